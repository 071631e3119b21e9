"""Multiply each expert's rows with the matrix of the expert, for all experts in one launch."""
