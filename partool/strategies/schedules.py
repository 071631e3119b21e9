"""Pipeline schedules that specs can name, one record each.

The function under a schedule's name in :data:`partool.schedule.generators.ORDERS` makes its action lists;
:mod:`partool.cost.memory.in_flight` prices the activations that the schedule holds at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stages = Literal["1", "2", "2 or more", "2 per wave", "any"]


@dataclass(frozen=True)
class ScheduleRecord:
    """Facts about a pipeline schedule."""

    words: str
    """One-line description."""
    source: str
    parity: str
    """Test that compares training with the schedule to training in one process."""
    stages: Stages = "1"
    """Number of stages per pipeline rank that the schedule accepts, or the rule for this number."""
    whole_rounds: bool = False
    """True: the number of micro-batches must be a multiple of the number of ranks."""
    split: bool = False
    """True: backward passes are split into gradients of inputs and of weights, so stages cannot be compiled."""
    capped: bool = False
    """True: a spec can set ``in_flight`` to lower the number of micro-batches that the schedule keeps in flight."""
    moves: Literal["activations", "weights"] = "activations"
    """Tensors that ranks send each other; if they send weights, each micro-batch stays on one rank."""
    folded: bool = False
    """True: stages are placed on the ranks in alternately ascending and descending order.
    False: stage s is on rank s modulo the number of ranks.
    """
    one_at_the_end: bool = False
    """True: the last stage holds one micro-batch at a time and does not split its backward pass, so that a fused loss
    can compute gradients in the forward pass."""
    tier: int = 1
    """Tier of evidence (:mod:`partool.strategies.tiers`)."""
    repeats: bool = False
    """True: action lists for few and for many micro-batches have the same beginning and the same end."""

    @property
    def micro_batches(self) -> str:
        """Text that says which numbers of micro-batches the schedule accepts."""
        return "ranks × k" if self.whole_rounds else "any"

    @property
    def eager(self) -> bool:
        """True if blocks cannot be compiled, because backward passes are split or weights move between ranks."""
        return self.split or self.moves == "weights"

    @property
    def chooses_stages(self) -> bool:
        """True if a spec chooses the number of stages per rank, two or more."""
        return self.stages in ("2 or more", "2 per wave")

    @property
    def waves(self) -> bool:
        """True if a spec chooses the number of waves; in each wave, a forward pass goes down the ranks and back."""
        return self.stages == "2 per wave"

    @property
    def least_stages(self) -> int:
        """Smallest number of stages per pipeline rank that the schedule accepts."""
        return 1 if self.stages in ("1", "any") else 2


_TESTS = "tests/parity/test_pipeline_trainer.py"
_ONE_BY_ONE = f"{_TESTS}::test_training_through_a_pipeline_equals_one_process"
_WITH_ZERO = f"{_TESTS}::test_every_schedule_with_every_zero_stage_equals_one_process"

SCHEDULES: dict[str, ScheduleRecord] = {
    "gpipe": ScheduleRecord(
        "all forward passes, then all backward passes", "arXiv 1811.06965", _WITH_ZERO, tier=0, repeats=True
    ),
    "1f1b": ScheduleRecord(
        "forward and backward passes alternate; as many micro-batches in flight as ranks",
        "arXiv 2006.09503", _ONE_BY_ONE, tier=0, one_at_the_end=True, repeats=True,
    ),
    "interleaved": ScheduleRecord(
        "1F1B over several distant stages per rank", "arXiv 2104.04473", _ONE_BY_ONE,
        tier=0, stages="2 or more", whole_rounds=True, one_at_the_end=True, repeats=True,
    ),
    "zb-h1": ScheduleRecord(
        "1F1B; gradients of weights fill its idle gaps, in the same memory", "arXiv 2401.10241", _ONE_BY_ONE,
        split=True, repeats=True,
    ),
    "zb-v": ScheduleRecord(
        "down the ranks and back, gradients of weights fill the gaps", "arXiv 2405.15362", _ONE_BY_ONE,
        stages="2", split=True, capped=True, folded=True,
    ),
    "hanayo": ScheduleRecord(
        "waves: down the ranks and back; best for few micro-batches", "SC'23", _ONE_BY_ONE,
        stages="2 per wave", capped=True, folded=True, one_at_the_end=True,
    ),
    "weipipe": ScheduleRecord(
        "weights go round the ranks, activations stay; full recompute", "PPoPP'25", _WITH_ZERO,
        stages="any", whole_rounds=True, moves="weights", one_at_the_end=True,
    ),
    "weipipe-naive": ScheduleRecord(
        "as weipipe, all forward turns before all backward turns", "PPoPP'25", _WITH_ZERO,
        stages="any", whole_rounds=True, moves="weights", one_at_the_end=True,
    ),
    "weipipe-zb": ScheduleRecord(
        "as weipipe, with gradients of weights in turns of their own", "PPoPP'25", _WITH_ZERO,
        stages="any", whole_rounds=True, split=True, moves="weights",
    ),
}  # fmt: skip
"""Name of a pipeline schedule in specs → facts about the schedule."""

TEXTBOOK = tuple(name for name, record in SCHEDULES.items() if record.tier == 0)
SPLIT = tuple(name for name, record in SCHEDULES.items() if record.split)
CAPPED = tuple(name for name, record in SCHEDULES.items() if record.capped)
MOVING_WEIGHTS = tuple(name for name, record in SCHEDULES.items() if record.moves == "weights")
WITH_WAVES = tuple(name for name, record in SCHEDULES.items() if record.waves)
SEVERAL_STAGES = tuple(name for name, record in SCHEDULES.items() if record.stages != "1")
