"""Plans and the files of runs; see docs/design/architecture.md."""
