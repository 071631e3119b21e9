"""The exchanges between ranks of one evaluation."""

from __future__ import annotations

from partool.plan.rank_trace import Collective
from partool.plan.types import Plan
from partool_runtime.data.batches import MicroBatch
from partool_runtime.dry.record import CollectiveRecord
from partool_runtime.jobs.train.stepping import Stepper
from partool_runtime.mesh import Ranks
from partool_runtime.parallel.comm import maximum_over


def evaluated(
    plan: Plan, stepper: Stepper, ranks: Ranks, micro: MicroBatch, vocabulary: dict[Collective, int]
) -> tuple[int, ...]:
    """Evaluate one micro-batch after a step, as the trainer does; return :attr:`RankTrace.evaluation_order`.

    Collectives that are not in ``vocabulary`` yet are added to it. The result is empty for a plan that holds no data
    out. The check for a stop request before each micro-batch is part of the evaluation.
    """
    if plan.data.validation == 0:
        return ()
    with CollectiveRecord() as record:
        record.vocabulary = vocabulary
        stepper.validate([micro], lambda: maximum_over(0, ranks.world, ranks.device) != 0)
    return tuple(record.order)
