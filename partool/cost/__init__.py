"""Cost of a layout: pure functions, one equation each. See docs/design/cost-model.md."""
