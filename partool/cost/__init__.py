"""Cost of a layout: pure functions, one equation each. See docs/cost-model.md."""
