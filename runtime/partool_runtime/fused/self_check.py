"""Comparison of kernels with torch on the training device, before training begins."""

from __future__ import annotations

from collections.abc import Callable

import torch

from partool.plan.types import Plan
from partool.spec.training import Fused
from partool_kernels.cases import BACKWARD, FORWARD, excess
from partool_kernels.device import interpreting
from partool_kernels.fp8_linear import fp8_linears
from partool_runtime.errors import ConfigurationError
from partool_runtime.fp8 import narrow_type
from partool_runtime.fused.probes import Probe, probes, random_numbers
from partool_runtime.mesh import Ranks
from partool_runtime.parallel.comm import maximum_over
from partool_runtime.precision import COMPUTE_DTYPE

Say = Callable[[str], None]
_NEAR = 2.0**-7
"""Allowed difference between two bf16 sums of the same products in different orders, relative to the largest sum."""


def with_working_parts(plan: Plan, ranks: Ranks, say: Say) -> Plan:
    """Return the plan without the fused parts whose kernels, compared with torch, are wrong on this machine.

    All ranks have to call this together, and leave the same parts to torch; ``say`` is called with a message about
    these parts. With ``kernels.mode: native`` the call raises ConfigurationError PT652 instead. Nothing is compared if
    torch computes all parts anyway.
    """
    parts, device = plan.layout.derived.fused, ranks.device
    if plan.kernels.mode == "torch" or (device.type == "cpu" and not interpreting()):
        return plan
    _need_fp8(plan, ranks)
    if not parts:
        return plan
    dtype = COMPUTE_DTYPE[plan.training.precision]
    wrong = {
        part: problem for part, probe in probes(plan.model, parts).items() if (problem := check(probe, device, dtype))
    }
    mask = sum(1 << place for place, part in enumerate(parts) if part in wrong)
    by_torch: list[Fused] = []
    for place, part in enumerate(parts):
        if maximum_over(mask >> place & 1, ranks.world, device):
            by_torch.append(part)
    if not by_torch:
        return plan
    problems = "; ".join(f"{part}: {wrong.get(part, 'so another rank found')}" for part in by_torch)
    if plan.kernels.mode == "native":
        help = "write mode: auto to leave these parts to torch, or kernels.fused without them"
        raise ConfigurationError("PT652", f"kernels differ from torch on this device: {problems}", help)
    say(f"kernels differ from torch on this device, so torch computes these parts: {problems}")
    kept = tuple(part for part in parts if part not in by_torch)
    return plan.model_copy(update={"layout": plan.layout.changed({"derived.fused": kept})})


def _need_fp8(plan: Plan, ranks: Ranks) -> None:
    """Raise ConfigurationError PT652 on all ranks if 8-bit products are wrong on any rank; they have no fallback."""
    if plan.training.precision != "fp8":
        return
    problem = check_fp8(plan.model.hidden, plan.model.ffn_hidden, ranks.device)
    if maximum_over(int(bool(problem)), ranks.world, ranks.device):
        message = f"products in 8 bits differ from torch on this device: {problem or 'so another rank found'}"
        raise ConfigurationError("PT652", message, "Plan it again with training.precision: bf16.")


def check_fp8(inner: int, outer: int, device: torch.device) -> str:
    """Return a description of errors in a linear layer's three fp8 products; empty if they equal torch's emulation.

    Products and emulation round the same numbers to 8 bits, so they may differ only in the order of their sums.
    """
    x, weight, grad = (
        random_numbers(*sizes).to(device, torch.bfloat16) for sizes in ((48, inner), (outer, inner), (48, outer))
    )
    leaves = x.requires_grad_(), weight.requires_grad_()
    results: list[list[torch.Tensor]] = []
    try:
        for mode in ("native", "torch"):
            (out,) = fp8_linears(leaves[0], [leaves[1]], narrow_type(device, "native"), mode)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    except Exception as error:  # compilers and drivers raise many kinds
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    for name, ours, theirs in zip(("results", "gradients of inputs", "gradients of weights"), *results, strict=True):
        far = (ours - theirs).abs().max() / theirs.abs().max()
        if not far <= _NEAR:
            return f"{name} differ by {float(far):.3g} of the largest one"
    return ""


def check(probe: Probe, device: torch.device, dtype: torch.dtype) -> str:
    """Return a description of a part's errors; empty if its kernels are as exact as torch."""
    try:
        ours = _computed(probe, device, dtype, "native")
        eager = _computed(probe, device, dtype, "torch")
        exact = _computed(probe, device, torch.float64, "torch", rounded=dtype)
    except Exception as error:  # compilers and drivers raise many kinds
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    for factor, *both in zip((FORWARD, BACKWARD), ours, eager, exact, strict=True):
        for one, other, true in zip(*both, strict=True):
            if (error_ratio := excess(one, other, true, factor)) > 1.0:
                what = "results" if factor == FORWARD else "gradients"
                return f"errors of {what} are {error_ratio:.3g} times the tolerance"
    return ""


def _computed(
    probe: Probe, device: torch.device, dtype: torch.dtype, mode: str, rounded: torch.dtype | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the probe's results, and the gradients of its inputs; inputs are first rounded to ``rounded``."""
    inputs = tuple(x.to(device, rounded or dtype).to(dtype).requires_grad_(probe.gradients) for x in probe.inputs)
    with torch.set_grad_enabled(probe.gradients):
        results = list(probe.run(inputs, mode))
        if not probe.gradients:
            return results, []
        # Different weights for each result and element: gradients of a plain sum would hide mistakes.
        weights = [torch.linspace(0.5, 1.5, x.numel(), device=device, dtype=x.dtype).view(x.shape) for x in results]
        total = torch.stack([(x * weight).sum() for x, weight in zip(results, weights, strict=True)]).sum()
        return [x.detach() for x in results], list(torch.autograd.grad(total, inputs))
