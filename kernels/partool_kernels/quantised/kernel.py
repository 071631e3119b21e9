"""Quantised matrices as numbers in Triton: one program converts a part of a row."""

# Triton reads the parameters' annotations, so they must not become strings here.
import triton
import triton.language as tl


@triton.jit
def _number(code):
    """Return the float32 number of a 4-bit code (QLoRA, arXiv 2305.14314, appendix E), by a tree of selections."""
    a = tl.where((code & 1) != 0, -0.6961928009986877, -1.0)
    b = tl.where((code & 1) != 0, -0.39491748809814453, -0.5250730514526367)
    c = tl.where((code & 1) != 0, -0.18477343022823334, -0.28444138169288635)
    d = tl.where((code & 1) != 0, 0.0, -0.09105003625154495)
    e = tl.where((code & 1) != 0, 0.16093020141124725, 0.07958029955625534)
    f = tl.where((code & 1) != 0, 0.33791524171829224, 0.24611230194568634)
    g = tl.where((code & 1) != 0, 0.5626170039176941, 0.44070982933044434)
    h = tl.where((code & 1) != 0, 1.0, 0.7229568362236023)
    low = tl.where((code & 4) != 0, tl.where((code & 2) != 0, d, c), tl.where((code & 2) != 0, b, a))
    high = tl.where((code & 4) != 0, tl.where((code & 2) != 0, h, g), tl.where((code & 2) != 0, f, e))
    return tl.where((code & 8) != 0, high, low)


@triton.jit
def dequantise_nf4(codes, scales, out, columns, skipped, BLOCK: tl.constexpr):
    """Write ``BLOCK`` elements of a row; the first of two has a byte's higher bits.

    64 elements share a scale, of which the first block lacks ``skipped``.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    byte = tl.load(codes + row * ((columns + 1) // 2) + at // 2, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + row * ((skipped + columns + 63) // 64) + (skipped + at) // 64, mask=inside, other=0.0)
    number = _number((byte >> ((1 - at % 2) * 4)) & 15) * scale
    tl.store(out + row * columns + at, number.to(out.dtype.element_ty), mask=inside)


@triton.jit
def dequantise_int8(codes, scales, out, columns, skipped, BLOCK: tl.constexpr):
    """Write ``BLOCK`` elements of a row, which have one scale; ``skipped`` is not used."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    code = tl.load(codes + row * columns + at, mask=inside, other=0).to(tl.float32)
    number = code * tl.load(scales + row) * 7.874015718698502e-3
    tl.store(out + row * columns + at, number.to(out.dtype.element_ty), mask=inside)
