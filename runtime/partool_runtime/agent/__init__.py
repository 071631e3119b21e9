"""The agent of a node: starts its ranks, watches them, restarts them, and meets the agents of other nodes."""
