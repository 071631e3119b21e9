"""Gated linear units in Triton: one program per row and block of columns, arithmetic in float32.

GELU's exact form and its tanh approximation follow Hendrycks and Gimpel (arXiv 1606.08415), section 2; gated units
follow Shazeer (arXiv 2002.05202).
"""

# Triton reads the parameters' annotations, so they must not become strings here.
import triton
import triton.language as tl


@triton.jit
def _sigmoids(x):
    """Return the sigmoid of x and the sigmoid of -x; nothing overflows, and the smaller sigmoid keeps all digits."""
    small = tl.exp(-tl.abs(x))
    much = 1.0 / (1.0 + small)
    little = small * much
    return tl.where(x >= 0, much, little), tl.where(x >= 0, little, much)


@triton.jit
def _activated(gate, KIND: tl.constexpr):
    """Return the activation of the gate, and its derivative."""
    if KIND == "silu":
        below, above = _sigmoids(gate)
        return gate * below, below * (1.0 + gate * above)
    elif KIND == "gelu":
        below = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        return gate * below, below + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    else:
        # (1 + tanh(x)) / 2 is the sigmoid of 2x.
        below, above = _sigmoids(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
        slope = 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
        return gate * below, below + gate * below * above * slope


@triton.jit
def glu_forward(gate, up, out, gate_stride, up_stride, out_stride, columns, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Write activation(gate) · up to ``out``; all matrices are ``[rows, columns]``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    act, _ = _activated(g, KIND)
    # The activation is rounded first, as two separate kernels would round it: fusion does not change the result.
    act = act.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * out_stride + column, (act * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def glu_backward(
    grad, gate, up, grad_gate, grad_up,
    grad_stride, gate_stride, up_stride, grad_gate_stride, grad_up_stride,
    columns, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of ``gate`` and ``up`` for the result's gradient ``grad``; all are ``[rows, columns]``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    d = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    act, slope = _activated(g, KIND)
    tl.store(grad_gate + row * grad_gate_stride + column, (d * u * slope).to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + row * grad_up_stride + column, (d * act).to(grad_up.dtype.element_ty), mask=inside)
