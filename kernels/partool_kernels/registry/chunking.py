"""How many rows of logits exist at once, which planners have to know too."""

from __future__ import annotations

WIDE_ABOVE = 4
"""Chunks from which on the gradient of a half-precision weight is summed in float32: up to here each of the roundings
costs less than the one that comes at the end of all."""
_MOST_BYTES, _LEAST_BYTES = 2**30, 2**25


def chunk_rows(tokens: int, vocabulary: int, item_bytes: int) -> int:
    """Return how many of ``tokens`` rows of logits exist at once: their share in bytes is an eighth of float32's.

    So a quarter of the rows in half precision, where torch's own operators hold ten bytes for every logit at a time;
    never more than 1 GiB, and no less than 32 MiB, below which products are too small to be fast. Chunks are of equal
    size but for the last, in whole tiles of 128 rows where they are that large.
    """
    row_bytes = max(1, vocabulary) * item_bytes
    share = -(-tokens // (2 * item_bytes))
    rows = max(1, min(_MOST_BYTES // row_bytes, share), _LEAST_BYTES // row_bytes)
    if rows >= tokens:
        return max(1, tokens)
    equal = -(-tokens // -(-tokens // rows))
    return equal if equal < 128 else min(tokens, -(-equal // 128) * 128)
