"""C = A B in Triton: tiles are processed in groups that share cached rows of A; sums over K may be split.

The order of tiles is taken from Triton's tutorial on matrix products
(https://triton-lang.org/main/getting-started/tutorials/03-matrix-multiplication.html). Sums are split where the result
has few tiles. The parts of a split sum are written separately, and another kernel adds them in order. There are no
atomic operations, so every run gives the same result.
"""

# Triton reads the parameters' annotations, so they must not become strings here.
import triton
import triton.language as tl


@triton.jit
def tile_of(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return the row and column of tile number ``tile``; a group of GROUP_M tile rows is counted column by column."""
    width = GROUP_M * tiles_n
    first = (tile // width) * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    return first + (tile % width) % height, (tile % width) // height


@triton.jit
def gemm(
    a, b, out,
    rows, columns, inner,
    a_row, a_column, b_row, b_column, out_stride, part_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLIT: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Write ``A [rows, inner] @ B [inner, columns]`` to ``out``.

    If the sum over ``inner`` is split, each float32 part is written to ``out + part · part_stride``. ``WHOLE`` promises
    that every part's share of ``inner`` is a multiple of BLOCK_K. ``UPCAST`` converts A and B to float32 before the
    product, which the interpreter needs.
    """
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    tile, part = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
    row = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.cdiv(tl.cdiv(inner, BLOCK_K), SPLIT)
    start = part.to(tl.int64) * steps * BLOCK_K
    k = start + tl.arange(0, BLOCK_K)
    # Past the edge the first rows and columns are read again, so the loop needs no masks; their results are not
    # written. The remainder lets the compiler see which addresses are contiguous.
    a_at = a + (row % rows)[:, None] * a_row + k[None, :] * a_column
    b_at = b + k[:, None] * b_row + (column % columns)[None, :] * b_column
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for step in range(steps):
        if WHOLE:
            x, y = tl.load(a_at), tl.load(b_at)
        else:
            left = inner - start - step * BLOCK_K
            inside = tl.arange(0, BLOCK_K) < left
            x = tl.load(a_at, mask=inside[None, :], other=0.0)
            y = tl.load(b_at, mask=inside[:, None], other=0.0)
        if UPCAST:
            x, y = x.to(tl.float32), y.to(tl.float32)
        total = tl.dot(x, y, total, input_precision=PRECISION)
        # Strides may be 32-bit integers, but their multiples may exceed 32 bits.
        a_at += tl.full([], BLOCK_K, tl.int64) * a_column
        b_at += tl.full([], BLOCK_K, tl.int64) * b_row
    at = out + part.to(tl.int64) * part_stride + row[:, None] * out_stride + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < columns)[None, :])


@triton.jit
def gemm_sum(parts, out, size, columns, part_stride, out_stride, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Add the parts of a split sum, ``[PARTS, size]``, in order, and write the sum to the rows of ``out``."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for part in tl.static_range(PARTS):
        # The stride may be a 32-bit integer, but its multiples may exceed 32 bits.
        from_here = tl.full([], part, tl.int64) * part_stride
        total += tl.load(parts + from_here + at, mask=inside, other=0.0)
    place = at // columns * out_stride + at % columns
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
