"""What a layout costs: pure functions, one equation each. See docs/design/cost-model.md."""
