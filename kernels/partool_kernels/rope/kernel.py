"""Rotation of heads by their positions in Triton, alone or after a root-mean-square norm of each head.

Rotary embedding: Su et al., arXiv 2104.09864, section 3.4.2, pairing the two halves as in GPT-NeoX; the norm: Zhang
and Sennrich, arXiv 1910.07467. A program processes several heads of several tokens, and reads a token's angles once
for all these heads. Arithmetic is in float32.
"""

# Triton reads the parameters' annotations, so they must not become strings here.
import triton
import triton.language as tl


@triton.jit
def _places(block, tokens, length, heads, half, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the indices of a tile's sequences, positions, heads and columns, and the mask of its valid elements.

    A tile is ``[T, N, D/2]``.
    """
    token = block * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_D)
    token, head, column = token[:, None, None], head[None, :, None], column[None, None, :]
    inside = (token < tokens) & (head < heads) & (column < half)
    # The division is in 32 bits, which is much faster; offsets have 64 bits.
    return (token // length).to(tl.int64), (token % length).to(tl.int64), head.to(tl.int64), column, inside


@triton.jit
def _both(at, half, inside):
    """Return both halves of heads, in float32."""
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _angles(cos, sin, position, column, cos_stride, sin_stride, tokens_inside):
    """Return cosine and sine [T, 1, D/2]; the second halves of the tables hold the same values."""
    c = tl.load(cos + position * cos_stride + column, mask=tokens_inside, other=0.0)
    s = tl.load(sin + position * sin_stride + column, mask=tokens_inside, other=0.0)
    return c.to(tl.float32), s.to(tl.float32)


@triton.jit
def rope(
    cos, sin, heads_in, out,
    in_batch, in_token, in_head, out_batch, out_token, out_head, cos_stride, sin_stride,
    tokens, length, heads, half, turn,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write rotated heads; input and output are ``[B, S, N, D]``. ``turn`` -1.0 rotates back, as gradients need."""
    batch, position, head, column, inside = _places(
        tl.program_id(0), tokens, length, heads, half, BLOCK_T, BLOCK_N, BLOCK_D
    )
    at = heads_in + batch * in_batch + position * in_token + head * in_head + column
    first, second = _both(at, half, inside)
    known = (column < half) & (batch * length + position < tokens)
    c, s = _angles(cos, sin, position, column, cos_stride, sin_stride, known)
    s *= turn
    to = out + batch * out_batch + position * out_token + head * out_head + column
    tl.store(to, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(to + half, (second * c + first * s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rope_norm_forward(
    cos, sin, weight, heads_in, out,
    in_batch, in_token, in_head, out_batch, out_token, out_head, cos_stride, sin_stride,
    tokens, length, heads, half, eps,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write normalised and rotated heads; input and output are ``[B, S, N, D]``, and the weight is ``[D]``."""
    batch, position, head, column, inside = _places(
        tl.program_id(0), tokens, length, heads, half, BLOCK_T, BLOCK_N, BLOCK_D
    )
    at = heads_in + batch * in_batch + position * in_token + head * in_head + column
    first, second = _both(at, half, inside)
    mean = tl.sum(first * first + second * second, axis=2) / (2 * half)
    scale = tl.rsqrt(mean + eps)[:, :, None]
    low, high = _both(weight + column, half, column < half)
    # Values are rounded after each step, as separate kernels would round them: fusion does not change the results.
    narrow = heads_in.dtype.element_ty
    first = ((first * scale).to(narrow).to(tl.float32) * low).to(narrow).to(tl.float32)
    second = ((second * scale).to(narrow).to(tl.float32) * high).to(narrow).to(tl.float32)
    known = (column < half) & (batch * length + position < tokens)
    c, s = _angles(cos, sin, position, column, cos_stride, sin_stride, known)
    to = out + batch * out_batch + position * out_token + head * out_head + column
    tl.store(to, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(to + half, (second * c + first * s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rope_norm_backward(
    cos, sin, weight, heads_in, grad, grad_in, partial,
    in_batch, in_token, in_head, grad_batch, grad_token, grad_head, out_batch, out_token, out_head,
    cos_stride, sin_stride, tokens, length, heads, half, eps,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the heads, and every program's part of the weight's gradient, float32 ``[programs, D]``.

    A program steps through tokens with a stride, so the number of parts does not grow with the sequence length.
    """
    sum_low = tl.zeros([BLOCK_D], tl.float32)
    sum_high = tl.zeros([BLOCK_D], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(tokens, BLOCK_T), tl.num_programs(0)):
        batch, position, head, column, inside = _places(block, tokens, length, heads, half, BLOCK_T, BLOCK_N, BLOCK_D)
        at = grad + batch * grad_batch + position * grad_token + head * grad_head + column
        above, below = _both(at, half, inside)
        known = (column < half) & (batch * length + position < tokens)
        c, s = _angles(cos, sin, position, column, cos_stride, sin_stride, known)
        # The inverse rotation negates the sine.
        above, below = above * c + below * s, below * c - above * s
        at = heads_in + batch * in_batch + position * in_token + head * in_head + column
        first, second = _both(at, half, inside)
        mean = (tl.sum(first * first + second * second, axis=2) / (2 * half))[:, :, None]
        # Where eps is 0, rows past the end must not add 0 · ∞ to the weight's gradient.
        known = (position + batch * length < tokens) & (head < heads)
        scale = tl.rsqrt(tl.where(known, mean, 1.0) + eps)
        first, second = first * scale, second * scale
        sum_low += tl.sum(tl.sum(above * first, axis=1), axis=0)
        sum_high += tl.sum(tl.sum(below * second, axis=1), axis=0)
        low, high = _both(weight + column, half, column < half)
        above, below = above * low, below * high
        along = (tl.sum(above * first + below * second, axis=2) / (2 * half))[:, :, None]
        to = grad_in + batch * out_batch + position * out_token + head * out_head + column
        tl.store(to, (scale * (above - first * along)).to(grad_in.dtype.element_ty), mask=inside)
        tl.store(to + half, (scale * (below - second * along)).to(grad_in.dtype.element_ty), mask=inside)
    program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    place = partial + program * (2 * half) + tl.arange(0, BLOCK_D)
    some = tl.arange(0, BLOCK_D) < half
    tl.store(place, sum_low, mask=some)
    tl.store(place + half, sum_high, mask=some)
