"""Costs of an optimizer's step, also of one that treats matrices as wholes: seconds, bytes on the wire and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from partool.cost import collective
from partool.cost.case import Column, Layouts
from partool.cost.time.gemm import matmul_s
from partool.cost.training.one_bit import traffic_per_element
from partool.layout.matrices import NEWTON_SCHULZ_STEPS, MatrixStack, matrix_stacks, scaled_matrices
from partool.layout.parameters import is_frozen, parameters
from partool.spec.model import ModelConfig
from partool.spec.training import Adapt, OptimizerSpec, Precision
from partool.strategies.optimizers import OPTIMIZERS
from partool.work.training import MASTER_BYTES, MatrixUpdates, TrainingWork

_STREAM_SHARE = 0.80
"""Share of the memory bandwidth that updates reach."""
_UPDATE_S = 50e-6
"""Seconds of an update that do not depend on its size."""
_WIDE_SLOWDOWN = 16.0
"""Ratio of the time of products in float32 to the time in 16 bits on an accelerator: 15 on an H100 (989 and 67
TFLOP/s), 16 on an A100 (312 and 19.5 TFLOP/s), by NVIDIA's data sheets."""
_EXCHANGED = 6.0
"""Largest matrices that a rank holds at once where ranks share matrices: one that has arrived, the same before and
after a step of the iteration and in the order of its rows, and what is sent and received for the next one."""
_RETURNED = 2.0
"""Largest matrices of results that are sent and received, for each copy of the training state."""
_ALONE = 2.0
"""The same where a rank holds whole matrices."""
_LAMB_MORE_BYTES = 104.0
"""Bytes of memory traffic per parameter of LAMB's two passes by torch's operators, beyond those of AdamW's one pass:
they read and write 33 elements of four bytes, not 7."""
_LAMB_PIECE = 2**24
"""Most elements that LAMB updates at once; it has two temporaries of this size."""
_NORM_BYTES = 16
"""Bytes that ranks sum for each matrix: two squares of norms in float64."""


def moments_of(spec: OptimizerSpec) -> int:
    """Return the number of moments of a parameter that is not updated as a whole matrix."""
    return len(OPTIMIZERS[OPTIMIZERS[spec.name].rest or spec.name].moments)


def matrix_updates(spec: OptimizerSpec, precision: Precision) -> MatrixUpdates | None:
    """Return the costs of updates of whole matrices; None if the optimizer makes none."""
    record = OPTIMIZERS[spec.name]
    if not record.rest:
        return None
    return MatrixUpdates(len(record.moments), 2 if spec.newton_schulz == "bf16" else MASTER_BYTES[precision])


def adapted(spec: OptimizerSpec) -> Adapt | None:
    """Return which parameters' steps are scaled by norms of whole parameters; None if the optimizer scales none so."""
    return spec.adapt if OPTIMIZERS[spec.name].norms else None


@lru_cache(maxsize=16)
def _stacks(model: ModelConfig, frozen: tuple[str, ...]) -> tuple[MatrixStack, ...]:
    return tuple(matrix_stacks(model, frozen))


@lru_cache(maxsize=16)
def _matrix_share(model: ModelConfig, frozen: tuple[str, ...]) -> float:
    return sum(stack.elements for stack in _stacks(model, frozen)) / max(_trained(model, frozen), 1)


@lru_cache(maxsize=16)
def _trained(model: ModelConfig, frozen: tuple[str, ...]) -> int:
    return sum(info.elements for info in parameters(model) if not is_frozen(info.name, frozen))


def update_s(job: TrainingWork, layouts: Layouts, elements: Column) -> Column:
    """Return the seconds of norm, clipping and update on the device of a rank that owns ``elements`` parameters.

    They are 0 for a job without gradients.
    """
    if not job.backward:
        return 0.0
    return device_update_s(job, elements) + matrices_s(job, layouts) + norms_s(job, layouts) + _UPDATE_S


def device_update_s(job: TrainingWork, elements: Column) -> Column:
    """Return the seconds in which norm, clipping and update of ``elements`` parameters read and write memory."""
    moments: float = job.moments
    if job.matrices is not None:
        moments -= _matrix_share(job.model, job.frozen) * (job.moments - job.matrices.moments)
    # Each moment is read and written.
    fewer = 2.0 * 4.0 * (2 - moments)
    more = 0.0 if job.adapt is None else _LAMB_MORE_BYTES
    traffic = job.master_bytes / 4.0 * (job.stack.optimizer_bytes - fewer + more) + traffic_per_element(job)
    traffic += 3.0 * job.average_bytes  # the weights are read, and the average is read and written
    return traffic * elements / (_STREAM_SHARE * job.devices.memory_bytes_per_s)


def matrices_s(job: TrainingWork, layouts: Layouts) -> Column:
    """Return the seconds in which a rank's matrices are gathered, orthogonalised and scattered; 0 without any.

    The ranks of a pipeline position share its matrices. One matrix is exchanged while another one is orthogonalised;
    only the first gather and the last scatter have nothing beside them.
    """
    stacks = () if job.matrices is None else _stacks(job.model, job.frozen)
    if not stacks:
        return 0.0
    owners = _owners(layouts)
    each = {shape: _orthogonalise_s(job, *shape) for shape in {(stack.rows, stack.columns) for stack in stacks}}
    stacks_s = sum(stack.count * each[stack.rows, stack.columns] for stack in stacks)
    compute = np.maximum(stacks_s / layouts.pp / owners, max(each.values()))
    turns = np.maximum(np.ceil(sum(stack.count for stack in stacks) / layouts.pp / owners), 1.0)
    ranks = collective.group(job, owners, 1)
    start = 2.0 * turns * collective.all_to_all_s(job, 0.0, ranks)
    sent = matrix_bytes(job, layouts) * owners / np.maximum(owners - 1, 1)
    exchange = start + collective.all_to_all_s(job, sent, ranks)
    last = np.where(owners > 1, np.minimum(compute, exchange) / turns, 0.0)
    total_s: Column = np.maximum(compute, exchange) + last
    return total_s


def _orthogonalise_s(job: TrainingWork, rows: int, columns: int) -> float:
    """Return the seconds to orthogonalise one matrix; :func:`newton_schulz_flops` counts the same products."""
    m, n = sorted((rows, columns))
    step = 2.0 * matmul_s(job, m, m, n, wide=True) + matmul_s(job, m, m, m, wide=True)
    narrow = job.matrices is None or job.matrices.direction_bytes == 2
    slower = 1.0 if narrow or job.devices.backend == "cpu" or job.compute_bytes > 2 else _WIDE_SLOWDOWN
    return NEWTON_SCHULZ_STEPS * float(step) * slower


def _owners(layouts: Layouts) -> Column:
    """Return the number of ranks that share the matrices of a pipeline position."""
    return layouts.dp * layouts.cp * layouts.tp


def _copies(layouts: Layouts) -> Column:
    """Return the number of copies of the training state of a pipeline position."""
    stateless = (np.asarray(layouts.zero) == 0) | layouts.ring
    return np.where(stateless, layouts.dp * layouts.cp, layouts.replicas)


def matrix_bytes(job: TrainingWork, layouts: Layouts) -> Column:
    """Return the bytes that a rank sends on average to gather matrices on their owners and to scatter the results.

    The shards of a matrix go to its owner from the owner's copy of the training state; the result goes to all copies.
    """
    if job.matrices is None:
        return 0.0
    owners, copies = _owners(layouts), _copies(layouts)
    of_copy = owners / copies
    elements = sum(stack.elements for stack in _stacks(job.model, job.frozen)) / layouts.pp / owners
    return elements * ((of_copy - 1) / of_copy + copies - 1 / of_copy) * job.matrices.direction_bytes


@lru_cache(maxsize=16)
def _packed_bytes(model: ModelConfig, adapt: Adapt, frozen: tuple[str, ...]) -> float:
    return float(_NORM_BYTES * sum(scaled_matrices(model, adapt, frozen).values()))


def _norm_ranks(job: TrainingWork, layouts: Layouts) -> Column:
    """Return the number of ranks that sum norms: all of them, or one if each holds all of every parameter."""
    if job.adapt is None:
        return 1.0
    return np.where(layouts.world > _copies(layouts), layouts.world, 1.0)


def norms_s(job: TrainingWork, layouts: Layouts) -> Column:
    """Return the seconds of the all-reduce of norms of whole parameters; 0 if no steps are scaled by them."""
    if job.adapt is None:
        return 0.0
    ranks = collective.group(job, _norm_ranks(job, layouts), 1)
    return collective.all_reduce_s(job, _packed_bytes(job.model, job.adapt, job.frozen), ranks)


def norm_bytes(job: TrainingWork, layouts: Layouts) -> Column:
    """Return the bytes that a rank sends to sum norms of whole parameters."""
    if job.adapt is None:
        return 0.0
    ranks = _norm_ranks(job, layouts)
    return 2.0 * (ranks - 1) / ranks * _packed_bytes(job.model, job.adapt, job.frozen)


def working_bytes(job: TrainingWork, layouts: Layouts) -> Column:
    """Return the bytes of the temporaries of an optimizer that treats matrices as wholes; 0 for any other."""
    if job.adapt is not None:
        owned = _trained(job.model, job.frozen) * _copies(layouts) / layouts.world
        return 2.0 * np.minimum(owned, _LAMB_PIECE) * job.master_bytes
    stacks: Iterable[MatrixStack] = () if job.matrices is None else _stacks(job.model, job.frozen)
    shapes = Counter((stack.rows, stack.columns) for stack in stacks)
    if job.matrices is None or not shapes:
        return 0.0
    matrices = np.where(_owners(layouts) > 1, _EXCHANGED + _RETURNED * _copies(layouts), _ALONE)
    most = [matrices * rows * columns + 2.0 * min(rows, columns) ** 2 for rows, columns in shapes]
    largest: Column = np.maximum.reduce(most)
    return largest * job.matrices.direction_bytes
