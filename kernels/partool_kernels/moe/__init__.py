"""Permute tokens so that each expert's rows are contiguous, and sum the experts' results for each token."""
