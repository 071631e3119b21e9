"""Runs a plan's steps with few micro-batches, and repeats what was recorded for those of the whole plan.

The passes of most micro-batches of a step are equal. A rank executes a step of the plan with fewer micro-batches, in
which its list of actions has the same regions of repeated actions. Two repetitions of each region are compared, and
the record of one is copied for the micro-batches that were left out. Where anything differs, all micro-batches run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from partool.plan.schedule import refuses
from partool.plan.types import Plan
from partool_runtime.dry.compose import Composition, Copy, Place, Segment, composed_order
from partool_runtime.dry.layer_log import Unequal
from partool_runtime.dry.marks import MARK, Marks, TraceMark
from partool_runtime.dry.regions import LEAST, Pairing, Token, paired, repeated, tokens_of
from partool_runtime.parallel.pipeline.passes import trained_schedule

_TRIED = 48
"""Most numbers of micro-batches that are tried."""


@dataclass(frozen=True, slots=True)
class Shorter:
    """A plan with fewer micro-batches that stands for another one."""

    plan: Plan
    micro_batches: int
    """Number of micro-batches of the whole plan."""
    terms: frozenset[str]
    """Terms of the timer that begin a pass."""
    tokens: tuple[Token, ...] = ()
    """The whole plan's passes in a pipeline; empty without one."""
    short_tokens: tuple[Token, ...] = ()
    pairing: Pairing | None = None

    def composed(self, marks: Marks) -> tuple[list[int], int]:
        """Make the records those of the whole plan; return the last step's order of collectives and its operators.

        Raises :class:`Unequal`.
        """
        marks.memory.settle()
        segments = self._segments(marks)
        copies, compared = self._copies(segments)
        composition = Composition(segments, copies, marks.memory)
        composition.check(compared)
        operators = composition.write()
        return composed_order(segments, copies), operators

    def _segments(self, marks: Marks) -> list[Segment]:
        record, last = marks.record, marks.marks[-1].step
        end = TraceMark("end", 0, -2, len(marks.memory.log), record.operators)
        places = self._places(marks.marks)
        cuts = [at for at, entry in enumerate(record.order) if entry == MARK]
        orders = [tuple(record.order[a:b]) for a, b in zip(cuts, [*cuts[1:], len(record.order)], strict=True)]
        segments: list[Segment] = []
        for mark, after, place in zip(marks.marks, [*marks.marks[1:], end], places, strict=True):
            order = orders[len(segments) - len(marks.marks) + len(orders)] if mark.step == last else ()
            stopped = after.operators if after.step == mark.step or after is end else mark.operators
            segments.append(Segment(place, (mark.logged, after.logged), (mark.operators, stopped), order))
        return segments

    def _places(self, marks: Sequence[TraceMark]) -> list[Place]:
        places: list[Place] = []
        section, passes = -1, 0
        for before, mark in zip([None, *marks[:-1]], marks, strict=True):
            goes_on = before is not None and mark.kind == before.kind != "step" and mark.kind == "pass"
            if not goes_on and (mark.kind != "item" or mark.number == 0):
                section, passes = section + 1, 0
            if mark.kind != "pass":
                places.append(Place((mark.step, section), "", mark.number if mark.kind == "item" else -1))
                continue
            places.append(self._pass((mark.step, section), passes, self.short_tokens))
            passes += 1
        return places

    def _pass(self, section: tuple[int, int], number: int, tokens: Sequence[Token]) -> Place:
        if not tokens:
            return Place(section, "", number)
        if number >= len(tokens):
            raise Unequal("a pass that the schedule has not")
        token = tokens[number]
        return Place(section, f"{token.kind} {token.stage}", token.micro_batch)

    def _copies(self, segments: Sequence[Segment]) -> tuple[list[Copy], list[tuple[int, int]]]:
        """Return the segments of the whole plan, and the pairs of segments that must be equal."""
        copies: list[Copy] = []
        compared: list[tuple[int, int]] = []
        count, at = self.plan.layout.derived.accumulation, 0
        while at < len(segments):
            section = segments[at].place.section
            stop = next((i for i in range(at, len(segments)) if segments[i].place.section != section), len(segments))
            if segments[at].place.micro_batch < 0:
                copies += [Copy(segments[i].place, i) for i in range(at, stop)]
            elif segments[at].place.kind and self.pairing is not None:
                if stop - at != len(self.short_tokens):
                    raise Unequal("another number of passes than the schedule has")
                places = map(partial(self._pass, section, tokens=self.tokens), range(len(self.tokens)))
                copies += [Copy(place, at + i) for place, i in zip(places, self.pairing.templates, strict=True)]
                compared += [(at + one, at + other) for one, other in self.pairing.compared]
            elif stop - at == count:
                wanted = enumerate(repeated(count, self.micro_batches))
                copies += [Copy(Place(section, "", number), at + i) for number, i in wanted]
                compared.append((at + count - 3, at + count - 2))
            else:
                raise Unequal("a loop over another number of micro-batches")
            at = stop
        return copies, compared


def shorter(plan: Plan, pipeline_rank: int) -> Shorter | None:
    """Return a plan of few micro-batches for a rank; None if there is none, or if the host keeps tensors."""
    layout = plan.layout
    if layout.offload.active:
        return None
    if layout.mesh.pp == 1:
        terms = frozenset({"forward"} if layout.mesh.cp > 1 else ())
        enough = layout.derived.accumulation > LEAST
        return Shorter(_with(plan, LEAST), layout.derived.accumulation, terms) if enough else None
    if plan.devices.backend == "cpu":  # a rank keeps its last messages: 8 more micro-batches would be needed
        return None
    schedule = trained_schedule(plan)
    if schedule.moves != "activations" or layout.pipeline.schedule == "file":
        return None
    lead, tokens = tokens_of(schedule, pipeline_rank)
    for count in range(LEAST, min(layout.derived.accumulation, LEAST + _TRIED)):
        if refuses(layout, count) is not None:
            continue
        few = _with(plan, count)
        short_lead, short_tokens = tokens_of(trained_schedule(few), pipeline_rank)
        pairing = paired(short_tokens, tokens) if short_lead == lead else None
        if pairing is not None:
            terms = frozenset({"forward", "backward"})
            return Shorter(few, layout.derived.accumulation, terms, tuple(tokens), tuple(short_tokens), pairing)
    return None


def _with(plan: Plan, micro_batches: int) -> Plan:
    """Return a plan with another number of micro-batches."""
    derived = plan.layout.derived.model_copy(update={"accumulation": micro_batches, "schedule_hash": ""})
    return plan.model_copy(update={"layout": plan.layout.model_copy(update={"derived": derived})})
