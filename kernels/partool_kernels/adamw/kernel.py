"""AdamW in Triton: one launch updates many tensors, and reads and writes every element once.

The update is algorithm 2 of Loshchilov and Hutter, arXiv 1711.05101: the decay does not pass through the moments. A
table holds the addresses of the tensors. A list holds the table row that each program works on.
"""

# Triton reads the parameters' annotations, so they must not become strings here.
import triton
import triton.language as tl


@triton.jit
def _pointer(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return an address from the table as a pointer; ALIGNED promises that the address is a multiple of 16."""
    # A thread reads four elements at a time from every tensor, so all tensors have the same layout over the threads.
    bytes_: tl.constexpr = 16 if TYPE == "fp32" else 8
    if TYPE == "bf16":
        at = address.to(tl.pointer_type(tl.bfloat16))
    elif TYPE == "fp16":
        at = address.to(tl.pointer_type(tl.float16))
    else:
        at = address.to(tl.pointer_type(tl.float32))
    if ALIGNED:
        at = tl.multiple_of(at, bytes_)
    return at


@triton.jit
def _block(
    place, start, left, kept, beta1, rest1, beta2, rest2, step_size, root, eps, scale,
    GRADIENT: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update a block of a tensor; a full block is aligned and needs no mask, and the last block may be shorter."""
    parameter = _pointer(tl.load(place), "fp32", WHOLE) + start
    gradient = _pointer(tl.load(place + 1), GRADIENT, WHOLE) + start
    average = _pointer(tl.load(place + 2), "fp32", WHOLE) + start
    square = _pointer(tl.load(place + 3), "fp32", WHOLE) + start
    within = tl.arange(0, BLOCK)
    inside = None if WHOLE else within < left
    g = tl.load(gradient + within, mask=inside).to(tl.float32) * scale
    p = tl.load(parameter + within, mask=inside)
    m = beta1 * tl.load(average + within, mask=inside) + rest1 * g
    v = beta2 * tl.load(square + within, mask=inside) + rest2 * g * g
    # Divisions and roots are rounded as in torch, which costs no time, as the kernel is bound by memory.
    p = p * kept - step_size * tl.div_rn(m, tl.sqrt_rn(v) * root + eps)
    tl.store(parameter + within, p, mask=inside)
    tl.store(average + within, m, mask=inside)
    tl.store(square + within, v, mask=inside)


@triton.jit
def adamw(
    tensors, owners, kept, beta1, rest1, beta2, rest2, step_size, root, eps, scale,
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update float32 parameters and their two moments in place.

    Each row of ``tensors`` (int64) describes one parameter. It holds the addresses of the parameter, its gradient and
    its moments, the number of elements, the first program that works on the parameter, and a flag for weight decay.
    ``owners`` (int32) holds the index of the row that each program works on.
    """
    program = tl.program_id(0)
    place = tensors + tl.load(owners + program).to(tl.int64) * 7
    start = (program - tl.load(place + 5)) * BLOCK
    left = tl.load(place + 4) - start
    shrunk = tl.where(tl.load(place + 6) != 0, kept, 1.0)
    bits = tl.load(place) | tl.load(place + 1) | tl.load(place + 2) | tl.load(place + 3)
    if (left >= BLOCK) & (bits % 16 == 0):
        _block(
            place, start, left, shrunk, beta1, rest1, beta2, rest2, step_size, root, eps, scale, GRADIENT, True, BLOCK
        )
    else:
        _block(
            place, start, left, shrunk, beta1, rest1, beta2, rest2, step_size, root, eps, scale, GRADIENT, False, BLOCK
        )
