"""Parts of a model that partool's kernels compute, and the reasons why torch computes other parts."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from partool.diagnostics import Diagnostic
from partool.plan.layout import Layout
from partool.planner.problem import Problem
from partool.spec.parallel import Compile
from partool.spec.training import Fused
from partool.strategies.kernel_parts import FUSED_GATES, PARTS, UPDATES, WHOLE_WIDTH
from partool_kernels.registry import ARCHITECTURES


def fused(problem: Problem, compile: Compile, inner: int = 1) -> tuple[Fused, ...]:
    """Return the fused parts of layouts with this setting of ``compile``, in a fixed order.

    Norms whose width is cut over ``inner`` > 1 tensor ranks are excluded, as no kernel does the reduction over ranks
    that such norms need.

    With ``auto`` the fused parts are the loss and, if some blocks are not compiled (layers of experts may not be), all
    parts of a block that apply. A fused loss computes its gradients at once. The optimizer's update is left to torch's
    fused kernel, which moves as few bytes as partool's kernel.
    """
    pinned = problem.spec.kernels.fused
    excluded = WHOLE_WIDTH if inner > 1 else ()
    if pinned != "auto":
        return tuple(part for part in PARTS if part in pinned and part not in excluded)
    if problem.spec.kernels.mode == "torch" or problem.spec.training.precision == "fp64" or not has_kernels(problem):
        return ()
    all_compiled = compile == "block" and problem.model.moe is None
    wanted: tuple[Fused, ...] = tuple(
        name for name, part in PARTS.items() if part.place == "loss" or (part.place == "block" and not all_compiled)
    )
    return tuple(part for part in wanted if part not in excluded and not why_not(problem, part))


def has_kernels(problem: Problem) -> bool:
    """Return True if kernels are compiled and tuned for the accelerator."""
    return problem.devices.architecture in ARCHITECTURES


def why_not(problem: Problem, part: Fused) -> str:
    """Return why a part of the model cannot be fused; empty if it can."""
    model = problem.model
    record = PARTS[part]
    if record.place == "block" and problem.described is not None:
        return "transformers builds the layers"
    if record.place == "loss" and problem.spec.training.objective.prefers:
        return f"objective: {problem.spec.training.objective.kind} needs the loss of each token"
    if record.place == "loss" and problem.spec.training.distill is not None and problem.job.backward:
        return "the divergence from a teacher needs the logits of both models"
    if record.place == "update" and problem.spec.optimizer.name != part:
        return f"optimizer.name is {problem.spec.optimizer.name}"
    if record.needs == "gate" and model.activation not in FUSED_GATES:
        return f"activation: {model.activation} has {'no kernel' if model.gated else 'no gate'}"
    if record.needs == "rotation" and (model.position != "rope" or model.mla is not None):
        return "positions are not rotated" if model.position != "rope" else "latent attention rotates parts of heads"
    return ""


def check(problem: Problem) -> Iterator[Diagnostic]:
    """Find fused parts that the model does not have, or that have no kernel for the device or the precision."""
    spec, path = problem.spec, ("kernels", "fused")
    pinned = () if spec.kernels.fused == "auto" else spec.kernels.fused
    for part in dict.fromkeys(pinned):
        if reason := why_not(problem, part):
            able = [name for name in PARTS if not why_not(problem, name)]
            help = f"leave {part} out; this model can have {', '.join(able)}"
            yield Diagnostic("PT485", f"kernels.fused: {part} has nothing to compute: {reason}", path=path, help=help)
    shape, offload = spec.parallel.tensor.shape, spec.parallel.offload
    for name, why in _without_kernel(pinned, 1 if shape == "auto" else shape[1], offload.optimizer):
        how = "on the host" if name in UPDATES else "by torch's operators"
        message = f"kernels.fused: {name} will be computed {how}: {why}"
        yield Diagnostic("PT486", message, severity="warning", path=path, help=f"leave {name} out")
    on_cpu = problem.devices.backend == "cpu"
    if not pinned and spec.kernels.mode != "native":
        return
    if not on_cpu and spec.kernels.mode == "native" and not has_kernels(problem):
        supported = ", ".join(ARCHITECTURES)
        message = f"kernels.mode: native asks for compiled kernels, which {problem.devices.accelerator} has none of"
        yield Diagnostic(
            "PT270", message, path=("kernels", "mode"), help=f"use mode: auto; there are some for {supported}"
        )
        return
    reason = (
        "kernels.mode is torch" if spec.kernels.mode == "torch"
        else "precision is fp64" if spec.training.precision == "fp64"
        else f"there are no compiled ones for {'the CPU' if on_cpu else problem.devices.accelerator}"
        if on_cpu or not has_kernels(problem) else ""
    )  # fmt: skip
    if pinned and reason:
        message = f"kernels.fused: {', '.join(pinned)} will be computed by torch's operators: {reason}"
        help = "this saves memory, not time; leave kernels.fused to auto"
        yield Diagnostic("PT486", message, severity="warning", path=path, help=help)


def _without_kernel(parts: Collection[str], inner: int, optimizer: str) -> Iterator[tuple[str, str]]:
    """Yield each of ``parts`` that partool's kernels cannot compute in this layout, with the reason."""
    for name in (name for name in WHOLE_WIDTH if name in parts and inner > 1):
        yield name, f"{inner} tensor ranks share the width of norms and exchange sums in the middle"
    for name in (name for name in UPDATES if name in parts and optimizer in ("cpu", "nvme")):
        yield name, "the optimizer's state is in host memory"


def words(problem: Problem, layout: Layout) -> Iterator[str]:
    """Yield sentences on the fused parts of a layout, and on parts that are not fused although the spec lists them."""
    pinned = problem.spec.kernels.fused
    if pinned != "auto":
        for part, reason in _without_kernel(pinned, layout.tensor.inner, layout.offload.optimizer):
            yield f"No own kernel for {part}: {reason}."
        return
    if not layout.derived.fused:
        return
    listed = [PARTS[part].words for part in layout.derived.fused]
    joined = " and ".join([", ".join(listed[:-1]), listed[-1]] if len(listed) > 1 else listed)
    how = "loss and its gradients at once" if layout.derived.fused == ("loss",) else f"{joined}, each in one pass"
    rest = "; the compiler fuses the rest" if layout.compile == "block" and problem.model.moe is None else ""
    yield f"Own kernels: {how}{rest}."
