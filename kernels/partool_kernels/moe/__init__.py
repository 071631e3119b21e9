"""Mixture of experts: permute tokens so that each expert's rows are contiguous, and sum the results per token."""
