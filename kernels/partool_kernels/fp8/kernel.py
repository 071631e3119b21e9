"""Conversion to 8 bits with one scale per block: the matrix, its transpose, or both in one call.

Blocks are as in DeepSeek-V3 (arXiv 2412.19437, section 3.3): 1 x 128 for activations and gradients, 128 x 128 for
weights.
"""

# Triton reads the parameters' annotations, so they must not become strings here.
import triton
import triton.language as tl


@triton.jit
def _scale(size, LARGEST: tl.constexpr, POWER: tl.constexpr):
    """Return a block's scale and the factor that multiplies its numbers.

    ``size`` has the bits, as an integer, of the largest magnitude; those of infinities and NaNs are the largest.
    """
    finite = size < 0x7F800000
    largest = tl.where(finite, size, 0).to(tl.float32, bitcast=True)
    # Multiply by the rounded reciprocal instead of dividing: devices do not all round divisions alike.
    scale = tl.maximum(largest * (1.0 / LARGEST), 1.1754943508222875e-38)
    if POWER:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(largest > 0.0, scale, 1.0)
    factor = tl.where(finite, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), 0.0)
    # A block with a number that is not finite has a NaN scale: every result computed from it is NaN.
    return tl.where(finite, scale, float("nan")), factor


@triton.jit
def _narrow(value, TYPE: tl.constexpr, LEAST: tl.constexpr):
    """Return numbers in the 8-bit TYPE, rounded to nearest, ties to even.

    LEAST is the smallest positive number of the type. With LEAST 0 the device rounds; otherwise this code rounds,
    because Triton's interpreter does not round ties to even.
    """
    if LEAST > 0.0:
        power = (value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        apart = tl.maximum(power * 0.125, LEAST)
        # Adding 1.5 * 2^23 units rounds to whole units: float32 holds no fractions of a unit at that size.
        near = (value + apart * 12582912.0) - apart * 12582912.0
        value = tl.where(near == 0.0, value * 0.0, near)
    return value.to(TYPE)


@triton.jit
def _read(x, row, column, rows, columns, x_stride):
    """Return numbers in float32 (0 for infinities and NaNs), the bits of their magnitudes, and which are inside."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    size = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(size < 0x7F800000, value, 0.0), size, inside


@triton.jit
def _write_rows(
    x, q, scale, first_row, tile_column, rows, columns, x_stride, q_stride, scale_stride,
    POWER: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write ROWS x 128 numbers of the matrix, with a scale per row."""
    row, column = first_row + tl.arange(0, ROWS), tile_column * 128 + tl.arange(0, 128)
    value, size, inside = _read(x, row, column, rows, columns, x_stride)
    found, factor = _scale(tl.max(size, axis=1), LARGEST, POWER)
    tl.store(scale + tile_column * scale_stride + row, found, mask=row < rows)
    narrow = _narrow(value * factor[:, None], q.dtype.element_ty, LEAST)
    tl.store(q + row[:, None] * q_stride + column[None, :], narrow, mask=inside)


@triton.jit
def _write_columns(
    x, q_turned, scale_turned, tile_row, first_column, rows, columns, x_stride, q_turned_stride, scale_turned_stride,
    POWER: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write 128 x COLUMNS numbers into the transpose, with a scale per column."""
    row, column = tile_row * 128 + tl.arange(0, 128), first_column + tl.arange(0, COLUMNS)
    value, size, inside = _read(x, row, column, rows, columns, x_stride)
    found, factor = _scale(tl.max(size, axis=0), LARGEST, POWER)
    tl.store(scale_turned + tile_row * scale_turned_stride + column, found, mask=column < columns)
    narrow = _narrow(value * factor[None, :], q_turned.dtype.element_ty, LEAST)
    tl.store(q_turned + column[None, :] * q_turned_stride + row[:, None], narrow, mask=inside)


@triton.jit
def _write_square(
    x, q, scale, q_turned, scale_turned, tile_row, tile_column,
    rows, columns, x_stride, q_stride, scale_stride, q_turned_stride, scale_turned_stride,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, POWER: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Write 128 x 128 numbers of the matrix, of the transpose or of both, with one scale."""
    row, column = tile_row * 128 + tl.arange(0, 128), tile_column * 128 + tl.arange(0, 128)
    value, size, inside = _read(x, row, column, rows, columns, x_stride)
    # These are vectors of one element, as Triton gives no access to the bits of scalars.
    one = tl.arange(0, 1)
    found, factor = _scale(one + tl.max(tl.max(size, axis=1), axis=0), LARGEST, POWER)
    if TURNED:
        # The barrier keeps the compiler from holding the tile in registers until the scale is known; a cache holds it.
        tl.debug_barrier()
        value, size, inside = _read(x, row, column, rows, columns, x_stride)
    narrow = _narrow(value * factor[:, None], q.dtype.element_ty, LEAST)
    if PLAIN:
        tl.store(scale + tile_column * scale_stride + tile_row + one, found)
        tl.store(q + row[:, None] * q_stride + column[None, :], narrow, mask=inside)
    if TURNED:
        tl.store(scale_turned + tile_row * scale_turned_stride + tile_column + one, found)
        tl.store(q_turned + column[None, :] * q_turned_stride + row[:, None], narrow, mask=inside)


@triton.jit
def fp8_quantise(
    x, q, scale, q_turned, scale_turned,
    rows, columns, column_tiles, x_stride, q_stride, scale_stride, q_turned_stride, scale_turned_stride,
    SQUARE: tl.constexpr, PLAIN: tl.constexpr, TURNED: tl.constexpr, POWER: tl.constexpr, LARGEST: tl.constexpr,
    LEAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write ``x [rows, columns]`` in 8 bits (PLAIN) and its transpose (TURNED).

    Without SQUARE the matrix has a scale per row and 128 columns, and the transpose has a scale per column and 128
    rows; a program converts ROWS x 128 numbers for the matrix or 128 x COLUMNS for the transpose. With SQUARE both have
    a scale per 128 x 128 numbers, and a program converts these. The first axis of scales counts the blocks of 128 along
    the width that products sum over.
    """
    # A program that wrote a tile in both forms would take a processor's registers for itself. The programs of a tile
    # follow each other instead, so that a cache holds what the second form reads.
    parts: tl.constexpr = 128 // ROWS if PLAIN and TURNED and not SQUARE else 1
    turned_parts: tl.constexpr = 128 // COLUMNS if TURNED and not SQUARE else 0
    PARTS: tl.constexpr = turned_parts + (parts if PLAIN or SQUARE else 0)
    tile, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    tile_row, tile_column = (tile // column_tiles).to(tl.int64), (tile % column_tiles).to(tl.int64)
    if SQUARE:
        _write_square(
            x, q, scale, q_turned, scale_turned, tile_row, tile_column,
            rows, columns, x_stride, q_stride, scale_stride, q_turned_stride, scale_turned_stride,
            PLAIN, TURNED, POWER, LARGEST, LEAST,
        )  # fmt: skip
    elif part < turned_parts:
        _write_columns(
            x, q_turned, scale_turned, tile_row, tile_column * 128 + part * COLUMNS,
            rows, columns, x_stride, q_turned_stride, scale_turned_stride, POWER, LARGEST, LEAST, COLUMNS,
        )  # fmt: skip
    elif PLAIN:
        _write_rows(
            x, q, scale, (tile_row * parts + part - turned_parts) * ROWS, tile_column,
            rows, columns, x_stride, q_stride, scale_stride, POWER, LARGEST, LEAST, ROWS,
        )  # fmt: skip
