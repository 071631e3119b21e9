"""Code that every rank executes; needs torch. See docs/architecture.md."""
