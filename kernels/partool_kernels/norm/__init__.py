"""Norms of rows, RMSNorm and LayerNorm, alone or with the residual sum before them, and their backward passes."""
