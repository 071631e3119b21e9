"""Tokens of a mixture of experts: permuted so that each expert's rows are contiguous, and summed up again."""
