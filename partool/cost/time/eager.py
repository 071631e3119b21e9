"""Memory traffic of torch's operators on a CPU, where nothing is fused, and the price of memory that is mapped anew."""

from __future__ import annotations

import numpy as np

from partool.cost.case import Column
from partool.spec.model import ModelConfig
from partool.spec.training import Fused
from partool.work.base import Workload

_MAPPED_BYTES = 32 * 2**20
"""Size from which glibc maps memory for each tensor and unmaps it when the tensor is freed, whatever was freed before:
``DEFAULT_MMAP_THRESHOLD_MAX`` on 64-bit machines (mallopt(3)). The first write to each page of such a tensor is a page
fault. A free block of the heap that is large enough serves such a tensor, too; that is not modelled."""


def traffic(model: ModelConfig, part: Fused, *, backward: bool) -> float:
    """Return the reads and writes of a block's ``part``, relative to one read of its inputs and one of its results.

    Reads and writes of whole tensors are counted operator by operator, in float32, as the blocks in
    ``partool_runtime/model`` call them and as autograd answers; casts of 16-bit types are not counted.
    """
    if part == "norm":
        return _stream(model, backward=backward) / 10.0
    if part == "rope":
        # x·cos (2), the negative of a half (1), cat (2), its product with sin (2), the sum (3); backward as many.
        return 10.0 / 2.0
    if part == "glu":
        # The activation (2, backward 3), and the product with the other half (3, backward twice 3).
        # The clamped gate has 16 reads and writes, backward 43 (partool_runtime/model/clamped.py).
        if model.activation == "swiglu_clamped":
            return (43.0 if backward else 16.0) / 3.0
        moved = (9.0 if backward else 5.0) if model.gated else (3.0 if backward else 2.0)
        return moved / (3.0 if model.gated else 2.0)
    return 1.0


def _stream(model: ModelConfig, *, backward: bool) -> float:
    """Return the hidden widths per token that two norms and two residual sums read and write.

    RMSNorm is a square (2), a mean (1), and products with the scale and with the weight (2 each). Its backward pass has
    the gradients of both factors of the product with the weight (4 and 2) and of that with the scale (4 and 2), of the
    mean (1) and of the square (7), and a sum of two gradients (3). torch has one kernel for LayerNorm (2, backward 3).
    Backward, the gradients of both branches are added at each residual sum (3), and those of queries, keys and values
    and of gate and up projection at their common input (3 each).
    """
    rms = model.norm == "rmsnorm"
    if not backward:
        return 2.0 * (7.0 if rms else 2.0) + 2.0 * 3.0
    common = 3.0 * (2 + model.gated)
    return 2.0 * (23.0 if rms else 3.0) + 2.0 * 3.0 + common


def mapped_s(job: Workload, tensor_bytes: Column, moved_bytes: Column) -> Column:
    """Return the additional seconds to write ``moved_bytes`` to new tensors of ``tensor_bytes`` each.

    They are 0 for tensors that glibc puts into memory that was freed before, on devices, and without a calibration.
    """
    fresh = job.devices.fresh_bytes_per_s
    if job.devices.backend != "cpu" or fresh is None:
        return 0.0
    additional = max(0.0, 1.0 / fresh - 1.0 / job.devices.memory_bytes_per_s)
    return np.where(np.asarray(tensor_bytes) >= _MAPPED_BYTES, moved_bytes * additional, 0.0)
