"""Pipeline schedules that specs can name, one record each.

A record's lists are made by the function of :data:`partool.schedule.generators.ORDERS` under its name; what of them
exists at once is priced in :mod:`partool.cost.memory.in_flight`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stages = Literal["1", "2", "2 or more", "2 per wave", "any"]


@dataclass(frozen=True)
class ScheduleRecord:
    """Facts about a schedule."""

    words: str
    """One sentence on the schedule."""
    source: str
    parity: str
    """The test that compares training under it with one process."""
    stages: Stages = "1"
    """Per pipeline rank."""
    whole_rounds: bool = False
    """The number of micro-batches is a multiple of the ranks."""
    split: bool = False
    """Backward passes come in two halves, gradients of inputs and of weights: its stages cannot be compiled."""
    capped: bool = False
    """It can be made for fewer micro-batches in flight than it would have."""
    moves: Literal["activations", "weights"] = "activations"
    """Tensors that travel between ranks; with weights, each micro-batch stays on one rank."""
    folded: bool = False
    """Stages go to and fro over the ranks; elsewhere stage s is on rank s modulo the ranks."""
    one_at_the_end: bool = False
    """The last stage holds one micro-batch at a time, with its backward pass in one: gradients come with a fused
    loss."""
    repeats: bool = False
    """Lists of fewer micro-batches begin and end as those of more do."""

    @property
    def micro_batches(self) -> str:
        """The numbers of micro-batches that it takes, in words."""
        return "ranks × k" if self.whole_rounds else "any"

    @property
    def eager(self) -> bool:
        """Whether blocks cannot be compiled: backward passes in halves, or weights that come and go."""
        return self.split or self.moves == "weights"

    @property
    def chooses_stages(self) -> bool:
        """Whether a spec chooses how many stages each rank has, of two or more."""
        return self.stages in ("2 or more", "2 per wave")

    @property
    def waves(self) -> bool:
        """Whether stages go to and fro in waves, whose number a spec chooses."""
        return self.stages == "2 per wave"

    @property
    def least_stages(self) -> int:
        """The fewest stages per pipeline rank."""
        return 1 if self.stages in ("1", "any") else 2


_TESTS = "tests/parity/test_pipeline_trainer.py"
_ONE_BY_ONE = f"{_TESTS}::test_training_through_a_pipeline_equals_one_process"
_WITH_ZERO = f"{_TESTS}::test_every_schedule_with_every_zero_stage_equals_one_process"

SCHEDULES: dict[str, ScheduleRecord] = {
    "gpipe": ScheduleRecord(
        "all forward passes, then all backward passes", "arXiv 1811.06965", _WITH_ZERO, repeats=True
    ),
    "1f1b": ScheduleRecord(
        "a forward and a backward pass in turn; keeps one micro-batch per rank", "arXiv 2006.09503", _ONE_BY_ONE,
        one_at_the_end=True, repeats=True,
    ),
    "interleaved": ScheduleRecord(
        "1F1B over several distant stages per rank", "arXiv 2104.04473", _ONE_BY_ONE,
        stages="2 or more", whole_rounds=True, one_at_the_end=True, repeats=True,
    ),
    "zb-h1": ScheduleRecord(
        "1F1B; gradients of weights fill its gaps, in its memory", "arXiv 2401.10241", _ONE_BY_ONE,
        split=True, repeats=True,
    ),
    "zb-v": ScheduleRecord(
        "down the ranks and up again, gradients of weights fill the gaps", "arXiv 2405.15362", _ONE_BY_ONE,
        stages="2", split=True, capped=True, folded=True,
    ),
    "hanayo": ScheduleRecord(
        "waves: to and fro over the ranks; best where micro-batches are few", "SC'23", _ONE_BY_ONE,
        stages="2 per wave", capped=True, folded=True, one_at_the_end=True,
    ),
    "weipipe": ScheduleRecord(
        "weights go round the ranks, activations stay; full recompute", "PPoPP'25", _WITH_ZERO,
        stages="any", whole_rounds=True, moves="weights", one_at_the_end=True,
    ),
    "weipipe-naive": ScheduleRecord(
        "the same, all forward turns before all backward turns", "PPoPP'25", _WITH_ZERO,
        stages="any", whole_rounds=True, moves="weights", one_at_the_end=True,
    ),
    "weipipe-zb": ScheduleRecord(
        "the same, with gradients of weights in turns of their own", "PPoPP'25", _WITH_ZERO,
        stages="any", whole_rounds=True, split=True, moves="weights",
    ),
}  # fmt: skip
"""By the name that specs use."""

SPLIT = tuple(name for name, record in SCHEDULES.items() if record.split)
CAPPED = tuple(name for name, record in SCHEDULES.items() if record.capped)
MOVING_WEIGHTS = tuple(name for name, record in SCHEDULES.items() if record.moves == "weights")
WITH_WAVES = tuple(name for name, record in SCHEDULES.items() if record.waves)
SEVERAL_STAGES = tuple(name for name, record in SCHEDULES.items() if record.stages != "1")
