"""Measurement of saved activations and sent bytes; it costs time, so it is done once, early in a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from partool.layout.sequence import tokens
from partool.plan.types import Plan
from partool.strategies.optimizers import OPTIMIZERS
from partool_runtime.parallel.comm import EXPERT, LOADS, SEQUENCE, UPDATES, CollectiveTraffic, CommCounter
from partool_runtime.telemetry._memory import SavedTensors
from partool_runtime.telemetry._timers import Spans
from partool_runtime.telemetry.summary import MeasuredValue, Measures

SAMPLED_STEP = 2
"""Number of the sampled step of an attempt. The medians leave out this step and the first step, which allocates
memory.
"""


_BEGIN = ("forward", "parameter_gather")
"""Time terms; the count of a step's traffic begins as soon as any of these terms begins."""


def _sent(traffic: dict[str, CollectiveTraffic]) -> Counter[str]:
    """Return the sent bytes of each kind of collective."""
    return Counter({kind: entry.sent_bytes for kind, entry in traffic.items()})


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
        self._tensor: Counter[str] = Counter()
        """Bytes that this rank has sent to the ranks that share its matrices, by kind of collective."""
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
        record = OPTIMIZERS[plan.optimizer.name]
        self._updates = CommCounter() if record.rest or record.norms else None
        """Counts what updates of whole matrices, or by their norms, send after the end of the other count."""
        self._differs = bool(plan.prediction.time.exchanges)
        """Whether steps exchange different things, so that one step says nothing about the mean of the plan."""
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
        assert self._counter is not None
        sequence, expert, loads = (_sent(self._counter.snapshot(described=one)) for one in (SEQUENCE, EXPERT, LOADS))
        others = _sent(traffic)
        for part in (self._tensor, sequence, expert, loads):
            others.subtract(part)
        sent = {"parameter_gather": others["all_gather"]}
        if not self._differs:
            sent["gradient_sync"] = others["reduce_scatter"] + others["all_reduce"]
        if self._updates is not None:
            sent["optimizer"] = _sent(self._updates.snapshot(described=UPDATES)).total()
        sent |= {"tensor": self._tensor.total()} if len(self._tensor_ranks) > 1 else {}
        sent |= {"expert": expert.total()} if self._shares_experts else {}
        return sent | ({"sequence": sequence.total()} if self._shares_sequences else {})

    def _enter(self, term: str) -> None:
        if term in _BEGIN and self._counter is None:
            self._counter, self._counting = CommCounter(), True
            self._counter.__enter__()  # type: ignore[no-untyped-call]
        if term == "forward" and (self._pipeline or not self._seen_forward):
            self._watching = True
            self._saved.start()
        if term == "optimizer" and self._updates is not None:
            self._updates.__enter__()  # type: ignore[no-untyped-call]
        if term == "optimizer" and self._counting and self._counter is not None and len(self._tensor_ranks) > 1:
            # Counted before the norm of all gradients, as the tensor ranks may be the whole world.
            self._tensor = _sent(self._counter.snapshot(self._tensor_ranks, exactly=self._shares_experts))
            for one in (EXPERT, LOADS):
                self._tensor.subtract(_sent(self._counter.snapshot(self._tensor_ranks, one, self._shares_experts)))

    def _exit(self, term: str) -> None:
        if term in ("forward", "backward"):
            self._probe()
        if term == "forward" and self._watching:
            self._saved.stop()
            self._watching, self._seen_forward = False, True
            self._most_bytes = max(self._most_bytes, self._saved.live_bytes)
        elif term == "optimizer":
            if self._updates is not None:
                self._updates.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._stop_counting()

    def _probe(self) -> None:
        for term, count_bytes in self._probes.items():
            self._probed[term] = max(self._probed.get(term, 0), count_bytes())

    def _stop_counting(self) -> None:
        if self._counting and self._counter is not None:
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._counting = False
