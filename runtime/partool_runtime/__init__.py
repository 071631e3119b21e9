"""Code that every rank executes; needs torch. See docs/design/architecture.md."""
