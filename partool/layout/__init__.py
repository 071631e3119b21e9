"""What each rank holds: parameters, tokens, heads and layers. See docs/design/architecture.md."""
