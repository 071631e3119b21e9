"""Seconds of layers of experts from measured curves (:mod:`partool.catalog.silicon.experts`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from partool.catalog.lookup import table
from partool.catalog.silicon.experts import Curves, Rates, Sizes, curves, equation_s
from partool.cost.case import Column
from partool.cost.silicon.origin import PriceOrigin
from partool.work.base import Workload
from partool.work.stack import ExpertKernel

BACKWARD = 2.0
"""Seconds of a layer's backward pass relative to its forward pass, which nobody measured: gradients of inputs and of
weights are as many FLOPs each as the forward pass, and rows and inner values are moved about twice as often."""
KERNEL_RATIO: dict[ExpertKernel, float] = {"cutlass": 1.0, "grouped_mm": 1.0, "triton": 1.0, "deepgemm": 1.0}
"""Seconds of a code base's kernels relative to those of the measured family of :data:`_FAMILIES`. torch's
``grouped_mm`` is made of CUTLASS's kernels, and reached 0.97 of a dense product's rate where it was measured once
(docs/results/gpu.md); its other operators are priced by ``Stack.elementwise``."""
_TRITON_TO_CUTLASS = 1.25
"""Seconds of Triton's kernels relative to CUTLASS's, for devices and types on which only the latter were measured: in
16 bits this ratio is 1.22 to 1.32 on H100 and H200 (32 experts of 7,168 x 2,048, 1,024 and 4,096 rows each)."""
_FAMILIES: dict[ExpertKernel, tuple[str, ...]] = {
    "cutlass": ("cutlass", "trtllm-gen", "deepgemm", "triton", "triton-sglang", "ck"),
    "grouped_mm": ("cutlass", "trtllm-gen", "deepgemm", "triton", "triton-sglang", "ck"),
    "triton": ("triton", "triton-sglang", "cutlass", "ck"),
    "deepgemm": ("deepgemm", "cutlass", "trtllm-gen", "triton", "ck"),
}
"""Kernel of a code base → families of measured kernels, the nearest first."""
_SKEWED_LOAD = 2.0
"""Load of the busiest rank for which the curves of skewed loads hold. Those were measured with experts' loads from
power laws of 1.01 and 1.2, of which the busiest of 8 ranks with 256 experts has 1.6 times the mean, of 32 ranks 3."""
_RELATIVES = {"cuda": "a100-80", "rocm": "mi300x"}
"""Devices whose curves price devices of which no relative was measured: the oldest ones, which are nearest to these."""
_NEAR = 0.7
"""Distance of sizes from the nearest measured ones, in logarithms, up to which a price counts as interpolated."""


@dataclass(frozen=True)
class _Measured:
    """Curves for a workload: of even and of skewed loads, or of one of them."""

    even: Curves | None
    skewed: Curves | None

    @property
    def any(self) -> Curves:
        curve = self.even or self.skewed
        assert curve is not None
        return curve


def layer_s(job: Workload, sizes: Sizes) -> Column:
    """Return the seconds of columns of layers of experts in a forward pass, on a device that is no CPU.

    They contain both products, the activation, and the copies of rows into the experts' order and back, each in one
    kernel. They grow with the rows. The measured device's rates in the workload, relative to the catalog's, scale them.
    """
    measured = _measured(job)
    table_sizes = sizes._replace(gated=measured.any.gated)
    seconds = measured.any.seconds(table_sizes)
    if measured.even and measured.skewed and job.load > 1.0:
        # The same rows never take less time for being spread less evenly; the measured loads are drawn at random.
        share = min((job.load - 1.0) / (_SKEWED_LOAD - 1.0), 1.0)
        skewed = np.maximum(measured.skewed.seconds(table_sizes), seconds)
        seconds = seconds * (skewed / seconds) ** share
    scale = _equation_s(job, sizes) / equation_s(table_sizes, _rates_of(measured.any), measured.any.element_bytes)
    total: Column = _kernel_ratio(job.stack.expert_kernel, measured.any) * seconds * scale
    return total


def _kernel_ratio(kernel: ExpertKernel, measured: Curves) -> float:
    """Return the ratio of a code base's kernels to the curves that price them, which may be another family's."""
    other = kernel == "triton" and not measured.origin["kernel"].startswith(("triton", "ck"))
    return KERNEL_RATIO[kernel] * (_TRITON_TO_CUTLASS if other else 1.0)


def origin(job: Workload, sizes: Sizes) -> PriceOrigin:
    """Return where the price of one layer of experts comes from; ``sizes`` are plain numbers."""
    if job.devices.backend == "cpu":
        return PriceOrigin("assumed", "grouped products at 0.85 of a dense product's rate")
    measured = _measured(job).any
    entry = measured.origin
    near = measured.distance((float(sizes.hidden), float(sizes.inner), float(sizes.experts))) <= _NEAR
    inside = bool(measured.each[0] <= sizes.each <= measured.each[-1])
    same = job.devices.accelerator == entry["device"] and entry["kernel"] == _FAMILIES[job.stack.expert_kernel][0]
    text = f"{entry['kernel']} of {entry['framework']} on {entry['device']}, {entry['source']}"
    clocks, rates = job.devices.sustained_share, Rates(job.devices.achievable_flops, job.devices.memory_bytes_per_s)
    if not np.allclose(rates, _rates_of(measured)):
        text += f"; scaled to the rates of {job.devices.accelerator}"
    elif clocks < 1.0:
        text += f"; scaled by: clocks of a whole step, {clocks:g}"
    elif same and near and inside and job.stack.expert_kernel != "grouped_mm":
        return PriceOrigin("interpolated", text)
    return PriceOrigin("scaled", text)


def _measured(job: Workload) -> _Measured:
    """Return the curves of the nearest measured device, kernel and precision."""
    by_block = job.stack.fp8_kernel == "block" or job.stack.expert_kernel == "deepgemm"
    narrow = ("fp8-block", "fp8") if by_block else ("fp8", "fp8-block")
    dtypes = (*narrow, "bf16") if job.precision == "fp8" else ("bf16",)
    return _nearest(job.devices.measured_as, job.devices.backend, dtypes, job.stack.expert_kernel, job.model.gated)


@cache
def _nearest(device: str, backend: str, dtypes: tuple[str, ...], kernel: ExpertKernel, gated: bool) -> _Measured:
    families = _FAMILIES[kernel]
    if not gated and families[0] == "cutlass":
        families = ("cutlass-plain", *families)
    for name in (device, _RELATIVES[backend]):
        for dtype in dtypes:
            measured = [(family, pair) for family in families if (pair := _pair(f"{name}/{dtype}/{family}"))]
            if measured:
                first, nearest = measured[0]
                # Another call of the same kernel that was measured with even loads, too, is nearer.
                alike = [pair for family, pair in measured if family.split("-")[0] == first.split("-")[0]]
                return next((pair for pair in alike if pair.even), nearest)
    raise LookupError(f"no measured layers of experts for {backend}")


def _pair(name: str) -> _Measured | None:
    even, skewed = curves(f"{name}/even"), curves(f"{name}/skewed")
    return _Measured(even, skewed) if even or skewed else None


def _rates(job: Workload) -> Rates:
    """Return the workload's rates; over a whole step a device keeps only a share of its rate in products."""
    return Rates(job.devices.achievable_flops * job.devices.sustained_share, job.devices.memory_bytes_per_s)


def _rates_of(measured: Curves) -> Rates:
    """Return the catalog's rates of the measured device, in the measured precision."""
    entry = table("accelerators")[measured.origin["device"]]
    tflops = entry["achievable_tflops"]["bf16" if measured.element_bytes == 2 else "fp8"]
    return Rates(tflops * 1e12, entry["memory_gb_per_s"] * 1e9)


def _equation_s(job: Workload, sizes: Sizes) -> Column:
    weight_bytes = 1.0 if job.precision == "fp8" else float(job.compute_bytes)
    seconds: Column = equation_s(sizes, _rates(job), weight_bytes, float(job.compute_bytes))
    return seconds
