"""Products of groups of rows with one matrix per group, in Triton.

Rows of a group are contiguous and groups are in order, as after ``partool_kernels.moe``. Only the device knows the
number of rows of each group, so the number of launched programs suffices for any split of the rows into groups. Each
program finds its group by counting tiles. Programs that no group needs write zeros to the rows without a group.
"""

# Triton reads the parameters' annotations, so they must not become strings here.
import triton
import triton.language as tl


@triton.jit
def grouped_gemm(
    a, b, ends, out,
    rows, columns, inner, groups,
    a_stride, b_group, b_row, b_column, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUPS: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Write ``A [rows of group g, inner] @ B[g] [inner, columns]`` for every group g.

    ``GROUPS`` is a power of two above ``groups``. ``WHOLE`` promises that ``inner`` is a multiple of BLOCK_K.
    """
    tiles_n = tl.cdiv(columns, BLOCK_N)
    # Tiles of the same column come one after another, so that neighbouring programs read the same part of a matrix.
    tiles_m = tl.num_programs(0) // tiles_n
    tile_n, tile = tl.program_id(0) // tiles_m, tl.program_id(0) % tiles_m
    # Rows without a group count as one more group after the last group; they become zeros.
    group = tl.arange(0, GROUPS)
    first = tl.load(ends + group - 1, mask=(group > 0) & (group <= groups), other=0)
    last = tl.where(group < groups, tl.load(ends + group, mask=group < groups, other=0), rows)
    last = tl.where(group > groups, first, last)
    tiles = tl.where(group <= groups, (last - first + BLOCK_M - 1) // BLOCK_M, 0)
    before = tl.cumsum(tiles, axis=0) - tiles
    mine = (before <= tile) & (tile < before + tiles)
    found = tl.sum(tl.where(mine, group, 0), axis=0)
    start = tl.sum(tl.where(mine, first + (tile - before) * BLOCK_M, 0), axis=0).to(tl.int64)
    stop = tl.sum(tl.where(mine, last, 0), axis=0).to(tl.int64)
    row = start + tl.arange(0, BLOCK_M)
    column = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    # There are no steps for a tile without rows, or with only rows that have no group.
    steps = tl.where((start < stop) & (found < groups), tl.cdiv(inner, BLOCK_K), 0)
    k = tl.arange(0, BLOCK_K)
    # Rows past the group's end belong to another group: their products are computed too, but not written.
    a_at = a + tl.minimum(row, rows - 1)[:, None] * a_stride + k[None, :]
    b_at = b + found.to(tl.int64) * b_group + k[:, None] * b_row + (column % columns)[None, :] * b_column
    for step in range(steps):
        if WHOLE:
            x, y = tl.load(a_at), tl.load(b_at)
        else:
            inside = k < inner - step * BLOCK_K
            x = tl.load(a_at, mask=inside[None, :], other=0.0)
            y = tl.load(b_at, mask=inside[:, None], other=0.0)
        if UPCAST:
            x, y = x.to(tl.float32), y.to(tl.float32)
        total = tl.dot(x, y, total, input_precision=PRECISION)
        a_at += BLOCK_K
        # Strides may be 32-bit integers, but their multiples may exceed 32 bits.
        b_at += tl.full([], BLOCK_K, tl.int64) * b_row
    at = out + row[:, None] * out_stride + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(row < stop)[:, None] & (column < columns)[None, :])


@triton.jit
def grouped_gemm_weight(
    a, grad, ends, out,
    inner, columns,
    a_stride, grad_stride, out_group, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Write the gradient of every group's matrix, ``A[g]ᵀ [inner, rows of g] @ grad[g] [rows of g, columns]``."""
    tiles_n = tl.cdiv(columns, BLOCK_N)
    per_group = tl.cdiv(inner, BLOCK_M) * tiles_n
    group, tile = tl.program_id(0) // per_group, tl.program_id(0) % per_group
    first = tl.load(ends + group - 1, mask=group > 0, other=0)
    last = tl.load(ends + group)
    place = (tile // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (tile % tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    k = tl.arange(0, BLOCK_K)
    for step in range(tl.cdiv(last - first, BLOCK_K)):
        row = first + step * BLOCK_K + k
        inside = row < last
        x = tl.load(a + row[None, :] * a_stride + (place % inner)[:, None], mask=inside[None, :], other=0.0)
        y = tl.load(grad + row[:, None] * grad_stride + (column % columns)[None, :], mask=inside[:, None], other=0.0)
        if UPCAST:
            x, y = x.to(tl.float32), y.to(tl.float32)
        total = tl.dot(x, y, total, input_precision=PRECISION)
    at = out + group.to(tl.int64) * out_group + place[:, None] * out_stride + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(place < inner)[:, None] & (column < columns)[None, :])
