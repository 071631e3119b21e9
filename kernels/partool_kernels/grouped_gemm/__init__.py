"""Products of every expert's rows with its own matrix, in one launch."""
