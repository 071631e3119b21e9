"""What a layout costs: pure functions, one equation each. See docs/cost-model.md."""
