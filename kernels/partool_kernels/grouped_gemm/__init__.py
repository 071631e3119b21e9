"""Products of every expert's rows with the expert's matrix, in one launch."""
