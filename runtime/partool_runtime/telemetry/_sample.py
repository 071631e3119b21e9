"""Measurement of saved activations and sent bytes; it costs time, so it is done once, early in a run."""

from __future__ import annotations

from collections.abc import Callable

from partool.layout.sequence import tokens
from partool.plan.types import Plan
from partool_runtime.parallel.comm import EXPERT, SEQUENCE, CollectiveTraffic, CommCounter
from partool_runtime.telemetry._memory import SavedTensors
from partool_runtime.telemetry._timers import Spans
from partool_runtime.telemetry.summary import MeasuredValue, Measures

SAMPLED_STEP = 2
"""Number of the sampled step of an attempt. The medians leave out this step and the first step, which allocates
memory.
"""


_BEGIN = ("forward", "parameter_gather")
"""Time terms; the count of a step's traffic begins as soon as any of these terms begins."""


def _sum(traffic: dict[str, CollectiveTraffic]) -> int:
    return sum(entry.sent_bytes for entry in traffic.values())


class StepSampler:
    """Measures saved tensors in the first micro-batch's forward pass of one step, and traffic in the whole step.

    In a pipeline, where several micro-batches are in flight, it measures all forward passes, and takes the maximum of
    the bytes that are held at once. Values are not changed. A compiled model is not sampled, because the hooks would
    cause its graphs to be recompiled.
    """

    def __init__(self, plan: Plan, spans: Spans, rank: int = 0) -> None:
        self._spans = spans
        tensor = plan.layout.mesh.tp  # the innermost dimension: neighbouring ranks share matrices
        self._tensor_ranks = range(rank - rank % tensor, rank - rank % tensor + tensor)
        self._tensor_traffic: dict[str, CollectiveTraffic] = {}
        self._shares_sequences = plan.layout.mesh.cp > 1
        self._shares_experts = plan.layout.expert > 1
        self._possible = plan.layout.compile == "none"
        share = plan.shares[rank // tensor % plan.layout.mesh.cp]
        rows = plan.layout.micro_batch * tokens(share)
        self._saved = SavedTensors(plan.model.vocab, rows * plan.model.vocab, self._probe)
        self._probes: dict[str, Callable[[], int]] = {}
        self._probed: dict[str, int] = {}
        self._counter: CommCounter | None = None
        self._counting = False
        self._seen_forward = False
        self._pipeline = plan.layout.mesh.pp > 1
        self._watching = False
        self._most_bytes = 0

    def add_probe(self, term: str, count_bytes: Callable[[], int]) -> None:
        """Call ``count_bytes`` for a memory term after each pass of the sampled step, and in its first forward pass."""
        self._probes[term] = count_bytes

    def arm(self) -> None:
        """Sample the step that begins now."""
        if self._possible:
            self._spans.on_enter, self._spans.on_exit = self._enter, self._exit

    def disarm(self) -> None:
        """Stop sampling, even in the middle of a step; calling again does nothing."""
        self._spans.on_enter = self._spans.on_exit = None
        self._stop_counting()

    def measures(self) -> Measures:
        """Return the measurements; empty before the sampled step has ended."""
        if self._counter is None or self._counting:
            return Measures()
        how = "collective counter"
        probed = {term: MeasuredValue(value, "counted tensors") for term, value in self._probed.items()}
        saved = {"activations": MeasuredValue(self._most_bytes, "saved-tensor hook")} if self._most_bytes else {}
        sent = {term: MeasuredValue(value, how) for term, value in self._sent_bytes(self._counter.snapshot()).items()}
        return Measures(memory={**saved, **probed}, traffic=sent)

    def _sent_bytes(self, traffic: dict[str, CollectiveTraffic]) -> dict[str, int]:
        """Return the number of sent bytes by term."""
        tensor = {kind: entry.sent_bytes for kind, entry in self._tensor_traffic.items()}
        assert self._counter is not None
        sequence = {kind: entry.sent_bytes for kind, entry in self._counter.snapshot(described=SEQUENCE).items()}
        expert = {kind: entry.sent_bytes for kind, entry in self._counter.snapshot(described=EXPERT).items()}
        others = {
            kind: entry.sent_bytes - tensor.get(kind, 0) - sequence.get(kind, 0) for kind, entry in traffic.items()
        }
        sent = {
            "gradient_sync": others.get("reduce_scatter", 0) + others.get("all_reduce", 0),
            "parameter_gather": others.get("all_gather", 0),
        }
        within = self._counter.snapshot(self._tensor_ranks, described=EXPERT)
        sent |= {"tensor": sum(tensor.values()) - _sum(within)} if len(self._tensor_ranks) > 1 else {}
        sent |= {"expert": sum(expert.values())} if self._shares_experts else {}
        return sent | ({"sequence": sum(sequence.values())} if self._shares_sequences else {})

    def _enter(self, term: str) -> None:
        if term in _BEGIN and self._counter is None:
            self._counter, self._counting = CommCounter(), True
            self._counter.__enter__()  # type: ignore[no-untyped-call]
        if term == "forward" and (self._pipeline or not self._seen_forward):
            self._watching = True
            self._saved.start()
        if term == "optimizer" and self._counting and self._counter is not None and len(self._tensor_ranks) > 1:
            # Counted before the norm of all gradients, as the tensor ranks may be the whole world.
            self._tensor_traffic = self._counter.snapshot(self._tensor_ranks)

    def _exit(self, term: str) -> None:
        if term in ("forward", "backward"):
            self._probe()
        if term == "forward" and self._watching:
            self._saved.stop()
            self._watching, self._seen_forward = False, True
            self._most_bytes = max(self._most_bytes, self._saved.live_bytes)
        elif term == "optimizer":
            self._stop_counting()

    def _probe(self) -> None:
        for term, count_bytes in self._probes.items():
            self._probed[term] = max(self._probed.get(term, 0), count_bytes())

    def _stop_counting(self) -> None:
        if self._counting and self._counter is not None:
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._counting = False
