"""Compression to signs in Triton: one program holds a chunk in registers, so that one pass over memory suffices.

Bit i of byte j is set where element 8 j + i is zero or positive. Elements past the end count as zeros, but their bits
are not set.
"""

# Triton reads the parameters' annotations, so they must not become strings here.
import triton
import triton.language as tl


@triton.jit
def onebit_pack(x, error, lost, bits, scales, size, NORM: tl.constexpr, CHUNK: tl.constexpr):
    """Compress a chunk of ``x + error``; write the compression error to ``lost``, which may be the tensor ``error``."""
    chunk = tl.program_id(0).to(tl.int64)
    byte = tl.arange(0, CHUNK // 8)
    bit = tl.arange(0, 8)
    within = byte[:, None] * 8 + bit[None, :]
    # Positions are compared within the chunk, where int32 suffices.
    left = tl.minimum(size - chunk * CHUNK, CHUNK).to(tl.int32)
    inside = within < left
    at = chunk * CHUNK + within
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + tl.load(error + at, mask=inside, other=0.0)
    if NORM == "l1":
        scale = tl.sum(tl.abs(value)) / left.to(tl.float32)
    else:
        scale = tl.sqrt(tl.sum(value * value) / left.to(tl.float32))
    above = inside & (value >= 0.0)
    tl.store(lost + at, value - tl.where(above, scale, -scale), mask=inside)
    packed = tl.sum(above.to(tl.int32) << bit[None, :], axis=1)
    tl.store(bits + chunk * (CHUNK // 8) + byte, packed.to(tl.uint8))
    tl.store(scales + chunk, scale)


@triton.jit
def onebit_unpack(
    bits, scales, out, size, chunks, senders, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write each element's mean over the senders; an element is its chunk's scale with the sign given by ``bits``.

    ``bits`` is ``[senders, chunks, CHUNK / 8]``. Senders are added in order.
    """
    block = tl.program_id(0).to(tl.int64)
    byte = tl.arange(0, BLOCK // 8)
    bit = tl.arange(0, 8)
    within = byte[:, None] * 8 + bit[None, :]
    first = block * BLOCK
    total = tl.zeros([BLOCK // 8, 8], dtype=tl.float32)
    chunk = first // CHUNK
    for _ in range(senders):
        word = tl.load(bits + chunk * (CHUNK // 8) + (first % CHUNK) // 8 + byte).to(tl.int32)
        scale = tl.load(scales + chunk)
        above = (word[:, None] >> bit[None, :]) & 1
        total += tl.where(above != 0, scale, -scale)
        chunk += chunks
    left = tl.minimum(size - first, BLOCK).to(tl.int32)
    mean = total / senders
    tl.store(out + first + within, mean.to(out.dtype.element_ty), mask=within < left)
