"""Conversion to 8 bits with one scale per block: the matrix, its transpose, or both in one pass over memory.

Blocks are as in DeepSeek-V3 (arXiv 2412.19437, section 3.3): 1 x 128 for activations and gradients, 128 x 128 for
weights.
"""

# Triton reads the parameters' annotations, so they must not become strings here.
import triton
import triton.language as tl


@triton.jit
def _scale(largest, finite, LARGEST: tl.constexpr, POWER: tl.constexpr):
    """Return a block's scale and the factor that multiplies its numbers; ``largest`` is its largest magnitude."""
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
def fp8_quantise(
    x, q, scale, q_turned, scale_turned,
    rows, columns, column_tiles, x_stride, q_stride, scale_stride, q_turned_stride, scale_turned_stride,
    SQUARE: tl.constexpr, PLAIN: tl.constexpr, TURNED: tl.constexpr, POWER: tl.constexpr, LARGEST: tl.constexpr,
    LEAST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write ``x [rows, columns]`` in 8 bits (PLAIN) and its transpose (TURNED); a program converts ROWS x 128 numbers.

    Without SQUARE the matrix has a scale per row and 128 columns, and the transpose has a scale per column and 128
    rows. With SQUARE both have a scale per 128 x 128 numbers. The first axis of scales counts the blocks of 128 along
    the width that products sum over. TURNED and SQUARE need ROWS = 128.
    """
    tile = tl.program_id(0)
    tile_row, tile_column = tile // column_tiles, tile % column_tiles
    row = tile_row.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tile_column.to(tl.int64) * 128 + tl.arange(0, 128)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    size = tl.abs(value)
    # The comparison is false for infinities and NaNs. Maxima ignore NaNs.
    endless = (size < float("inf")) == 0
    value, size = tl.where(endless, 0.0, value), tl.where(endless, 0.0, size)
    type_: tl.constexpr = q.dtype.element_ty
    if SQUARE:
        largest = tl.max(tl.max(size, axis=1), axis=0)
        finite = tl.max(tl.max(endless.to(tl.int32), axis=1), axis=0) == 0
        # These are vectors of one element, as Triton gives no access to the bits of scalars.
        one = tl.arange(0, 1)
        found, factor = _scale(tl.where(one == 0, largest, 0.0), (one == 0) & finite, LARGEST, POWER)
        narrow = _narrow(value * factor[:, None], type_, LEAST)
        if PLAIN:
            tl.store(scale + tile_column.to(tl.int64) * scale_stride + tile_row + one, found)
            tl.store(q + row[:, None] * q_stride + column[None, :], narrow, mask=inside)
        if TURNED:
            tl.store(scale_turned + tile_row.to(tl.int64) * scale_turned_stride + tile_column + one, found)
            tl.store(q_turned + column[None, :] * q_turned_stride + row[:, None], narrow, mask=inside)
    else:
        if PLAIN:
            finite = tl.max(endless.to(tl.int32), axis=1) == 0
            found, factor = _scale(tl.max(size, axis=1), finite, LARGEST, POWER)
            tl.store(scale + tile_column.to(tl.int64) * scale_stride + row, found, mask=row < rows)
            tl.store(
                q + row[:, None] * q_stride + column[None, :],
                _narrow(value * factor[:, None], type_, LEAST),
                mask=inside,
            )
        if TURNED:
            finite = tl.max(endless.to(tl.int32), axis=0) == 0
            found, factor = _scale(tl.max(size, axis=0), finite, LARGEST, POWER)
            tl.store(scale_turned + tile_row.to(tl.int64) * scale_turned_stride + column, found, mask=column < columns)
            narrow = _narrow(value * factor[None, :], type_, LEAST)
            tl.store(q_turned + column[None, :] * q_turned_stride + row[:, None], narrow, mask=inside)
