"""Tasks of lm-evaluation-harness: a process beside rank 0 that loads them, asks for scores and computes metrics."""
