"""Permutation of tokens by expert in Triton; one program writes each row, without atomics, and sums are float32.

``places`` holds the index of the permuted row for each of a token's K choices. Rows from ``kept[0]`` on belong to
choices whose expert is on another rank: zeros are written to these rows, and values read from them are not used.
"""

# Triton reads the parameters' annotations, so they must not become strings here.
import triton
import triton.language as tl


@triton.jit
def moe_permute(
    x, rows, places, kept,
    x_stride, rows_stride,
    columns, CHOICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy every token of ``x [tokens, columns]`` to the rows of the token's K choices; each token is read once."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    value = tl.load(x + token * x_stride + column, mask=inside, other=0.0)
    limit = tl.load(kept)
    for choice in tl.static_range(CHOICES):
        place = tl.load(places + token * CHOICES + choice)
        tl.store(rows + place * rows_stride + column, tl.where(place < limit, value, 0.0), mask=inside)


@triton.jit
def moe_unpermute(
    rows, out, places, kept, weights,
    rows_stride, out_stride,
    columns, CHOICES: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write for each token the sum of its choices' rows, added in order; WEIGHTED multiplies rows with weights."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    limit = tl.load(kept)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in tl.static_range(CHOICES):
        place = tl.load(places + token * CHOICES + choice)
        here = column < tl.where(place < limit, columns, 0)
        value = tl.load(rows + place * rows_stride + column, mask=here, other=0.0).to(tl.float32)
        if WEIGHTED:
            # Only rows before ``kept[0]`` are weighted: a NaN weight of another row must not spoil the sum.
            weight = tl.load(weights + token * CHOICES + choice).to(tl.float32)
            value *= tl.where(place < limit, weight, 0.0)
        total += value
    tl.store(out + token * out_stride + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def moe_unpermute_backward(
    grad, rows, grad_rows, places, kept, weights, grad_weights,
    grad_stride, rows_stride, grad_rows_stride,
    columns, CHOICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of each choice's row and weight; a choice's program loops over the columns."""
    at = tl.program_id(0).to(tl.int64)
    place = tl.load(places + at)
    counts = place < tl.load(kept)
    readable = tl.where(counts, columns, 0)
    weight = tl.load(weights + at).to(tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        here = column < readable
        # Programs of the token's other choices run next to this program and find this gradient in the L2 cache.
        upper = tl.load(grad + (at // CHOICES) * grad_stride + column, mask=here, other=0.0).to(tl.float32)
        value = tl.load(rows + place * rows_stride + column, mask=here, other=0.0).to(tl.float32)
        total += upper * value
        lower = tl.where(counts, upper * weight, 0.0).to(grad_rows.dtype.element_ty)
        tl.store(grad_rows + place * grad_rows_stride + column, lower, mask=column < columns)
    tl.store(grad_weights + at, tl.sum(total, axis=0).to(grad_weights.dtype.element_ty))
