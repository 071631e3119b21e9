"""The agent of a node: starts its ranks, watches them, restarts them, and communicates with agents of other nodes."""
