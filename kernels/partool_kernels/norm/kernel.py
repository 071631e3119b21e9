"""Norms in Triton: a program processes whole rows, with float32 arithmetic.

RMSNorm follows Zhang and Sennrich (arXiv 1910.07467), LayerNorm Ba et al. (arXiv 1607.06450). Where a row has
several blocks, their means and sums of squares are merged as in Chan, Golub and LeVeque, "Updating Formulae and a
Pairwise Algorithm for Computing Sample Variances" (1979), equations 2.1.
"""

# Triton reads the parameters' annotations, so they must not become strings here.
import triton
import triton.language as tl


@triton.jit
def _summed(x, residual, row, x_stride, residual_stride, column, inside, ADD: tl.constexpr):
    """Return x, or with ADD the sum x + residual, rounded to the type of x."""
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        other = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        value = (value + other).to(x.dtype.element_ty).to(tl.float32)
    return value


@triton.jit
def _scaled(normed, weight, bias, column, inside_row, type_, LAYER: tl.constexpr, BIAS: tl.constexpr):
    """Return ``normed * weight + bias``; RMSNorm rounds ``normed`` before the product, as the Llama models do."""
    w = tl.load(weight + column, mask=inside_row, other=0.0).to(tl.float32)
    if LAYER:
        result = normed * w
        if BIAS:
            result += tl.load(bias + column, mask=inside_row, other=0.0).to(tl.float32)
    else:
        result = normed.to(type_).to(tl.float32) * w
    return result.to(type_)


@triton.jit
def norm_forward(
    x, residual, weight, bias, total, out, mean, rstd,
    x_stride, residual_stride, total_stride, out_stride, rows, columns, eps,
    LAYER: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, ONE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the norm of x and its statistics; with ADD also write x + residual, and normalise this sum instead of x.

    All matrices are ``[rows, columns]``.
    """
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = index[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    centre = tl.zeros([ROWS], tl.float32)
    if ONE:
        inside_row = column < columns
        inside = (row < rows) & inside_row
        value = _summed(x, residual, row, x_stride, residual_stride, column, inside, ADD)
        if ADD:
            tl.store(total + row * total_stride + column, value.to(total.dtype.element_ty), mask=inside)
        if LAYER:
            centre = tl.sum(value, 1) / columns
            value = tl.where(inside, value - centre[:, None], 0.0)
        scale = tl.rsqrt(tl.sum(value * value, 1) / columns + eps)
        result = _scaled(value * scale[:, None], weight, bias, column, inside_row, out.dtype.element_ty, LAYER, BIAS)
        tl.store(out + row * out_stride + column, result, mask=inside)
    else:
        squares = tl.zeros([ROWS], tl.float32)
        for start in range(0, columns, BLOCK):
            here = start + column
            inside = (row < rows) & (here < columns)
            value = _summed(x, residual, row, x_stride, residual_stride, here, inside, ADD)
            if ADD:
                tl.store(total + row * total_stride + here, value.to(total.dtype.element_ty), mask=inside)
            if LAYER:
                number = tl.minimum(columns - start, BLOCK).to(tl.float32)
                own = tl.sum(value, 1) / number
                value = tl.where(inside, value - own[:, None], 0.0)
                away = own - centre
                share = number / (start + number)
                centre += away * share
                squares += away * away * start * share
            squares += tl.sum(value * value, 1)
        scale = tl.rsqrt(squares / columns + eps)
        # The row is read again from the cache. The sum is recomputed: a barrier would be needed to read other threads'
        # stores.
        for start in range(0, columns, BLOCK):
            here = start + column
            inside_row = here < columns
            inside = (row < rows) & inside_row
            value = _summed(x, residual, row, x_stride, residual_stride, here, inside, ADD)
            normed = (value - centre[:, None]) * scale[:, None]
            result = _scaled(normed, weight, bias, here, inside_row, out.dtype.element_ty, LAYER, BIAS)
            tl.store(out + row * out_stride + here, result, mask=inside)
    tl.store(rstd + index, scale, mask=index < rows)
    if LAYER:
        tl.store(mean + index, centre, mask=index < rows)


@triton.jit
def _normed(x, mean, rstd, index, column, inside, x_stride, rows, LAYER: tl.constexpr):
    """Return the normalised rows, and their reciprocal standard deviations ``[ROWS, 1]``.

    Elements outside the mask ``inside`` have arbitrary values.
    """
    scale = tl.load(rstd + index, mask=index < rows, other=0.0)[:, None]
    value = tl.load(x + index[:, None] * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if LAYER:
        value -= tl.load(mean + index, mask=index < rows, other=0.0)[:, None]
    return value * scale, scale


@triton.jit
def _of_sum(grad_total, row, stride, column, inside, ADD: tl.constexpr):
    """Return the gradient of the residual sum, or 0 without ADD; the caller adds this gradient to the gradient of x."""
    if ADD:
        found = tl.load(grad_total + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    else:
        found = 0.0
    return found


@triton.jit
def norm_backward(
    grad, grad_total, x, weight, mean, rstd, grad_x, of_weight, of_bias,
    grad_stride, grad_total_stride, x_stride, grad_x_stride, rows, columns,
    LAYER: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, ONE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x; where a block holds a row, also write parts of the gradients of weight and bias.

    Each program writes one part, the sum over its rows; all parts together are ``[programs, columns]``. ``x`` is the
    norm's input; with ADD the input is the residual sum.
    """
    part = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    weights = tl.zeros([ROWS, BLOCK], tl.float32)
    biases = tl.zeros([ROWS, BLOCK], tl.float32)
    if ONE:
        # The weight is loaded once per program: inside of the loop it would be loaded again for every row.
        w = tl.load(weight + column, mask=column < columns, other=0.0)
    for first in tl.range(part * ROWS, rows, PARTS * ROWS, num_stages=STAGES):
        index = first + tl.arange(0, ROWS).to(tl.int64)
        row = index[:, None]
        if ONE:
            inside = (row < rows) & (column < columns)
            normed, scale = _normed(x, mean, rstd, index, column, inside, x_stride, rows, LAYER)
            g = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
            # This load starts before the sums over the row, where threads wait for each other.
            added = _of_sum(grad_total, row, grad_total_stride, column, inside, ADD)
            weighted = g * w.to(tl.float32)
            change = weighted - normed * (tl.sum(weighted * normed, 1) / columns)[:, None]
            if LAYER:
                change -= (tl.sum(weighted, 1) / columns)[:, None]
            change = change * scale + added
            tl.store(grad_x + row * grad_x_stride + column, change.to(grad_x.dtype.element_ty), mask=inside)
            weights += g * normed
            if BIAS:
                biases += g
        else:
            along = tl.zeros([ROWS], tl.float32)
            level = tl.zeros([ROWS], tl.float32)
            for start in range(0, columns, BLOCK):
                here = start + column
                inside = (row < rows) & (here < columns)
                normed, scale = _normed(x, mean, rstd, index, here, inside, x_stride, rows, LAYER)
                g = tl.load(grad + row * grad_stride + here, mask=inside, other=0.0).to(tl.float32)
                weighted = g * tl.load(weight + here, mask=here < columns, other=0.0).to(tl.float32)
                along += tl.sum(weighted * normed, 1)
                if LAYER:
                    level += tl.sum(weighted, 1)
            for start in range(0, columns, BLOCK):
                here = start + column
                inside = (row < rows) & (here < columns)
                normed, scale = _normed(x, mean, rstd, index, here, inside, x_stride, rows, LAYER)
                g = tl.load(grad + row * grad_stride + here, mask=inside, other=0.0).to(tl.float32)
                weighted = g * tl.load(weight + here, mask=here < columns, other=0.0).to(tl.float32)
                change = weighted - (normed * along[:, None] + level[:, None]) / columns
                change = change * scale + _of_sum(grad_total, row, grad_total_stride, here, inside, ADD)
                tl.store(grad_x + row * grad_x_stride + here, change.to(grad_x.dtype.element_ty), mask=inside)
    if ONE:
        place = part.to(tl.int64) * columns + tl.arange(0, BLOCK)
        inside_part = tl.arange(0, BLOCK) < columns
        tl.store(of_weight + place, tl.sum(weights, 0), mask=inside_part)
        if BIAS:
            tl.store(of_bias + place, tl.sum(biases, 0), mask=inside_part)


@triton.jit
def norm_weights(
    grad, x, mean, rstd, of_weight, of_bias,
    grad_stride, x_stride, rows, columns,
    LAYER: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write parts of the gradients of weight and bias, ``[programs, columns]``, where no block holds a whole row."""
    part = tl.program_id(0)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    weights = tl.zeros([ROWS, BLOCK], tl.float32)
    biases = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(part * ROWS, rows, PARTS * ROWS, num_stages=STAGES):
        index = first + tl.arange(0, ROWS).to(tl.int64)
        inside = (index[:, None] < rows) & (column < columns)
        normed, _ = _normed(x, mean, rstd, index, column, inside, x_stride, rows, LAYER)
        g = tl.load(grad + index[:, None] * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        weights += g * normed
        if BIAS:
            biases += g
    own = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = part.to(tl.int64) * columns + own
    tl.store(of_weight + place, tl.sum(weights, 0), mask=own < columns)
    if BIAS:
        tl.store(of_bias + place, tl.sum(biases, 0), mask=own < columns)
