"""Number of rows of logits that exist at once, which planners need too."""

from __future__ import annotations

WIDE_ABOVE = 4
"""Number of chunks above which the gradient of a half-precision weight is summed in float32: up to it each rounding
costs less than the final one."""
_MOST_BYTES, _LEAST_BYTES = 2**30, 2**25


def chunk_rows(tokens: int, vocabulary: int, item_bytes: int) -> int:
    """Return how many of ``tokens`` rows of logits exist at once: in bytes, an eighth of all logits in float32.

    In half precision that is a quarter of the rows, where torch's own operators hold ten bytes per logit at a time;
    never more than 1 GiB, and not below 32 MiB, where products are too small to be fast. Chunks have equal sizes
    but for the last, in whole tiles of 128 rows where they are that large.
    """
    row_bytes = max(1, vocabulary) * item_bytes
    share = -(-tokens // (2 * item_bytes))
    rows = max(1, min(_MOST_BYTES // row_bytes, share), _LEAST_BYTES // row_bytes)
    if rows >= tokens:
        return max(1, tokens)
    equal = -(-tokens // -(-tokens // rows))
    return equal if equal < 128 else min(tokens, -(-equal // 128) * 128)
