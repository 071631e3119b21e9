"""What every rank executes; needs torch. See docs/design/architecture.md."""
