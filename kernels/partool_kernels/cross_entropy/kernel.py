"""Cross entropy in Triton: one program per row reads the row twice and writes it once, for any vocabulary size.

The first pass keeps only the largest logit and the sum of ``exp(logit - largest)`` (online softmax, Milakov and
Gimelshein, arXiv 1805.02867), so a row may be larger than the registers. Logits of 256k tokens are read as fast as
those of 32k tokens. Arithmetic is float32.
"""

# Triton reads the parameters' annotations, so they must not become strings here.
import triton
import triton.language as tl

IGNORED = tl.constexpr(-100)


@triton.jit
def _tanh(x):
    """Return tanh of x; a series computes it near 0, where a quotient of exponentials would lose digits."""
    size = tl.abs(x)
    below = tl.exp(-2.0 * size)
    far = (1.0 - below) / (1.0 + below)
    square = x * x
    series = -0.05396825396825397 + square * 0.021869488536155203
    series = -0.3333333333333333 + square * (0.13333333333333333 + square * series)
    return tl.where(size < 0.2, x + x * square * series, tl.where(x < 0.0, -far, far))


@triton.jit
def _read(logits, column, columns, beyond, cap, CAP: tl.constexpr):
    """Return a block of a row's logits, capped if CAP; columns past the end of the row get the value ``beyond``."""
    if CAP:
        x = tl.load(logits + column, mask=column < columns, other=0.0).to(tl.float32)
        return tl.where(column < columns, cap * _tanh(x / cap), beyond)
    else:
        return tl.load(logits + column, mask=column < columns, other=beyond).to(tl.float32)


@triton.jit
def _summed(logits, columns, cap, CAP: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest logit of a row and the sum of ``exp(logit - largest)``."""
    highest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for begin in range(0, columns, BLOCK):
        x = _read(logits, begin + tl.arange(0, BLOCK), columns, float("-inf"), cap, CAP)
        now = tl.maximum(highest, tl.max(x, 0))
        # While all logits read are minus infinity, the difference of two of them would be NaN.
        base = tl.where(now == float("-inf"), 0.0, now)
        total = total * tl.exp(highest - base) + tl.sum(tl.exp(x - base), 0)
        highest = now
    return highest, total


@triton.jit
def _write_gradient(logits, out, columns, label, shift, factor, scale, cap, CAP: tl.constexpr, BLOCK: tl.constexpr):
    """Write ``exp(logit − shift) · factor`` for each column, and subtract ``scale`` in the label's column, if any."""
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        x = _read(logits, column, columns, 0.0, cap, CAP)
        found = tl.exp(x - shift) * factor
        found = tl.where(column == label, found - scale, found)
        if CAP:
            found *= 1.0 - (x / cap) * (x / cap)
        tl.store(out + column, found.to(out.dtype.element_ty), mask=column < columns)


@triton.jit
def _write_zeros(out, columns, BLOCK: tl.constexpr):
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        tl.store(out + column, tl.zeros((BLOCK,), out.dtype.element_ty), mask=column < columns)


@triton.jit
def cross_entropy(
    logits, labels, out, losses,
    logits_stride, out_stride, columns, scale, z_loss, cap,
    CAP: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the loss of every row; with GRADIENT also write the gradient times ``scale`` to ``out``.

    ``out`` may be the logits. A label that is neither a column nor ignored makes the row's loss and gradient NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    out += row * out_stride
    label = tl.load(labels + row)
    if label == IGNORED:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            _write_zeros(out, columns, BLOCK)
        return
    inside = (label >= 0) & (label < columns)
    target = tl.load(logits + label, mask=inside, other=float("nan")).to(tl.float32)
    if CAP:
        target = cap * _tanh(target / cap)
    highest, total = _summed(logits, columns, cap, CAP, BLOCK)
    log_total = tl.where(inside, highest + tl.log(total), float("nan"))
    tl.store(losses + row, log_total - target + z_loss * log_total * log_total)
    if GRADIENT:
        # No thread may overwrite the label's logit before all threads have read it.
        tl.debug_barrier()
        # exp(logit − log_total) would be less exact: its argument is rounded at a larger magnitude.
        factor = (1.0 + 2.0 * z_loss * log_total) * scale / total
        _write_gradient(logits, out, columns, label, highest, factor, scale, cap, CAP, BLOCK)


@triton.jit
def cross_entropy_parts(
    logits, labels, highest, sums, targets, logits_stride, columns, first, cap,
    CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write three numbers per row, computed from the part of the vocabulary that begins at token ``first``.

    The numbers are the largest logit, the sum of ``exp(logit - largest)``, and the label's logit, or 0 where the label
    is in another part. Rows with an ignored label are not read, and their numbers are 0, 1 and 0.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    label = tl.load(labels + row)
    if label == IGNORED:
        tl.store(highest + row, 0.0)
        tl.store(sums + row, 1.0)
        tl.store(targets + row, 0.0)
        return
    label -= first
    inside = (label >= 0) & (label < columns)
    target = tl.load(logits + label, mask=inside, other=0.0).to(tl.float32)
    if CAP:
        target = cap * _tanh(target / cap)
    high, total = _summed(logits, columns, cap, CAP, BLOCK)
    tl.store(highest + row, high)
    tl.store(sums + row, total)
    tl.store(targets + row, target)


@triton.jit
def cross_entropy_gradient(
    logits, labels, log_totals, scale, out,
    logits_stride, out_stride, columns, first, z_loss, cap,
    CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the sum of the losses, times ``scale[0]``, to ``out``, which may be the logits.

    The columns are the vocabulary's tokens from ``first`` on. ``log_totals`` are the logarithms of the sums of
    exponentials over the whole vocabulary.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    out += row * out_stride
    label = tl.load(labels + row)
    if label == IGNORED:
        _write_zeros(out, columns, BLOCK)
        return
    weight, log_total = tl.load(scale), tl.load(log_totals + row)
    factor = (1.0 + 2.0 * z_loss * log_total) * weight
    _write_gradient(logits, out, columns, label - first, log_total, factor, weight, cap, CAP, BLOCK)


@triton.jit
def scaled(x, factor, out, columns, BLOCK: tl.constexpr):
    """Write ``x · factor[0]`` to ``out``; ``x`` and ``out`` are contiguous ``[rows, columns]``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    place = row * columns + column
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * tl.load(factor)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)
