"""Number of rows of logits that exist at once, for kernels and planner."""

from __future__ import annotations

WIDE_ABOVE = 4
"""Number of chunks above which the gradient of a half-precision weight is summed in float32. With
fewer chunks, rounding the sum after each chunk costs less accuracy than the final rounding."""
_MOST_BYTES, _LEAST_BYTES = 2**30, 2**25


def chunk_rows(tokens: int, vocabulary: int, item_bytes: int) -> int:
    """Return the number of rows in a chunk of logits; a chunk has 1/8 of the bytes that all logits have in float32.

    In half precision a chunk has a quarter of the ``tokens`` rows; torch's operators would hold ten bytes per logit at
    once. A chunk has at most 1 GiB, and at least 32 MiB, as smaller products are not fast. All chunks except the last
    have equal sizes. A size of 128 rows or more is a multiple of 128 rows, the height of a tile.
    """
    row_bytes = max(1, vocabulary) * item_bytes
    share = -(-tokens // (2 * item_bytes))
    rows = max(1, min(_MOST_BYTES // row_bytes, share), _LEAST_BYTES // row_bytes)
    if rows >= tokens:
        return max(1, tokens)
    equal = -(-tokens // -(-tokens // rows))
    return equal if equal < 128 else min(tokens, -(-equal // 128) * 128)
