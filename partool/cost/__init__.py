"""Cost of a layout, computed by pure functions with one equation each. See docs/design/cost-model.md."""
