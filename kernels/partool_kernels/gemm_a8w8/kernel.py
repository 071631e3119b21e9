"""Products of 8-bit matrices with a scale per block of 128 of the inner width, in Triton.

Matrix units sum within a block; the sums of blocks are added in float32, as in DeepSeek-V3 (arXiv 2412.19437,
section 3.3.2), because Hopper's matrix units keep only about 14 bits of a sum. Tiles of the result are processed
in groups of tile rows; the tiles of a group share cached data (Triton's tutorial on matrix multiplication).
"""

# Triton reads the parameters' annotations, so they must not become strings here.
import triton
import triton.language as tl


@triton.jit
def gemm_a8w8(
    a, b, scale_a, scale_b, out,
    rows, columns, inner, a_stride, b_stride, scale_a_stride, scale_b_stride, out_stride, part_stride,
    SQUARE: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Write ``A[M, K] B[N, K]^T``; if the sum over K is split, write its parts as ``[SPLIT, M, N]``.

    Scales of A are ``[blocks, M]``. Scales of B are ``[blocks, N]``, or ``[blocks, blocks of N]`` with SQUARE. WHOLE
    promises that K is a multiple of 128.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    group = tile // (GROUP_M * tiles_n)
    first = group * GROUP_M
    high = min(tiles_m - first, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    tile_m, tile_n = first + within % high, within // high

    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Past the edge other rows and columns are read, whose results are not written: masks in the loop would cost more.
    row_read, column_read = row % rows, column % columns
    depth = tl.arange(0, 128)
    blocks = tl.cdiv(inner, 128)
    each = tl.cdiv(blocks, SPLIT)
    begin = part * each
    end = min(begin + each, blocks)
    offset = begin.to(tl.int64) * 128
    a_at = a + row_read.to(tl.int64)[:, None] * a_stride + (offset + depth)[None, :]
    b_at = b + column_read.to(tl.int64)[None, :] * b_stride + (offset + depth)[:, None]
    scale_a_at = scale_a + begin.to(tl.int64) * scale_a_stride + row_read
    if SQUARE:
        scale_b_at = scale_b + begin.to(tl.int64) * scale_b_stride + column_read // 128
    else:
        scale_b_at = scale_b + begin.to(tl.int64) * scale_b_stride + column_read
    # A tile that lies within one block of 128 x 128 has one scale for B.
    ALONE: tl.constexpr = SQUARE and 128 % BLOCK_N == 0
    alone_at = scale_b + begin.to(tl.int64) * scale_b_stride + tile_n * BLOCK_N // 128

    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in range(begin, end):
        if WHOLE:
            a_MK, b_KN = tl.load(a_at), tl.load(b_at)
        else:
            left = inner - block * 128
            a_MK = tl.load(a_at, mask=depth[None, :] < left, other=0.0)
            b_KN = tl.load(b_at, mask=depth[:, None] < left, other=0.0)
        product = tl.dot(a_MK, b_KN)
        if ALONE:
            total += product * (tl.load(scale_a_at) * tl.load(alone_at))[:, None]
        else:
            total += product * tl.load(scale_a_at)[:, None] * tl.load(scale_b_at)[None, :]
        a_at += 128
        b_at += 128
        scale_a_at += scale_a_stride
        scale_b_at += scale_b_stride
        alone_at += scale_b_stride

    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = out + part.to(tl.int64) * part_stride + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)
