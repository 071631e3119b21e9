"""The evaluation job, which is the work of one rank from the plan to the mean loss over the data."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from partool.plan.types import Plan
from partool_runtime.data import Batches, open_data
from partool_runtime.errors import EXIT_DONE, EXIT_PREEMPTED, Preempted
from partool_runtime.jobs.evaluate.judging import judge
from partool_runtime.jobs.evaluate.model import frozen_model
from partool_runtime.jobs.evaluate.sums import LossSums, load_sums
from partool_runtime.jobs.losses import loss_over
from partool_runtime.jobs.process import configure_process
from partool_runtime.mesh import Ranks, close_ranks, open_ranks
from partool_runtime.parallel.comm import maximum_over
from partool_runtime.preparation import Prepared
from partool_runtime.pulse import SILENT, Pulse
from partool_runtime.stop import StopRequest
from partool_runtime.telemetry import Recorder, SetFigures


def evaluate(plan: Plan, run_dir: Path, resume: bool, stop: StopRequest, pulse: Pulse = SILENT) -> None:
    """Compute the mean loss over the held-out data, or over all data if none are held out, each sequence once.

    At most ``training.steps`` batches are taken. ``resume`` goes on from the sums of an earlier attempt in ``run_dir``.
    A plan with tasks runs these instead, always from their beginning. Raises Preempted after a stop request, and
    ConfigurationError for an error that no retry fixes.
    """
    configure_process(plan)
    ranks = open_ranks(plan)
    stop.use(lambda value: maximum_over(value, ranks.world, ranks.device))
    with Recorder(
        plan, run_dir, rank=ranks.rank, world_size=ranks.world_size, device=ranks.device, pulse=pulse
    ) as recorder:
        if plan.evaluation.tasks:
            ended = judge(plan, run_dir, ranks, recorder=recorder, stop=stop, pulse=pulse)
            stopped, steps = not ended, 0
        else:
            stopped, steps = _losses(plan, run_dir, ranks, recorder, resume=resume, stop=stop, pulse=pulse)
    close_ranks(ranks)
    if stopped:
        raise Preempted(f"stopped by {stop.reason} after step {steps}")


def _losses(
    plan: Plan, run_dir: Path, ranks: Ranks, recorder: Recorder, *, resume: bool, stop: StopRequest, pulse: Pulse
) -> tuple[bool, int]:
    """Compute the mean loss over the data; return whether a stop request ended it, and the number of steps done."""
    pulse.enter("loading")
    data = open_data(plan, dp_rank=ranks.dp.place, dp_size=ranks.dp.size, barrier=ranks.barrier)
    for note in data.notes:
        recorder.warning(note)
    prepared = frozen_model(plan, ranks, recorder, pulse)
    identity = _identity(plan, data)
    names = tuple(data.evaluated)
    sums = load_sums(run_dir / "checkpoints", identity, ranks, names) if resume else LossSums.none(names)
    attempt = int(os.environ.get("PARTOOL_ATTEMPT", "1"))
    recorder.event("start", attempt=attempt, world_size=ranks.world_size, plan_hash=plan.hash, resumed_from=sums.steps)
    pulse.enter("training")
    run = _Run(plan, run_dir, ranks, prepared, data, recorder, stop, pulse, identity)
    batches = len(run.batches)
    recorder.expect(batches)
    sums = run.steps(sums)
    stopped = sums.steps < batches
    if not stopped:
        named = {name: SetFigures(each.loss, each.tokens) for name, each in sums.sets.items() if name}
        recorder.validation(sums.steps, sums.total.loss, sums.total.tokens, sets=named)
    pulse.enter("ending")
    data.close()
    prepared.passes.close()
    prepared.memory.close()
    if ranks.rank == 0 and not stopped:
        first, *others = sums.report(run_dir).lines()
        print("\n".join([f"{first} of {sum(data.evaluated.values()):,} sequences", *others]))
    recorder.close(EXIT_PREEMPTED if stopped else EXIT_DONE, stop.reason if stopped else "all data evaluated")
    return stopped, sums.steps


def _identity(plan: Plan, data: Batches) -> str:
    """Return a hash of all that decides the sums: data, their order and number, the model and its weights."""
    model, weights = (part.model_dump(mode="json") for part in (plan.model, plan.weights))
    training = (plan.training.seed, plan.training.z_loss, plan.training.precision)
    parts = (data.full_fingerprint, data.evaluated, model, weights, training)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Run:
    plan: Plan
    run_dir: Path
    ranks: Ranks
    prepared: Prepared
    data: Batches
    recorder: Recorder
    stop: StopRequest
    pulse: Pulse
    identity: str

    @property
    def batches(self) -> list[tuple[str, int]]:
        """Set and number of each batch that holds the set's sequences; a set's last one may be filled up."""
        batch = self.plan.training.global_batch
        return [(name, step) for name, count in self.data.evaluated.items() for step in range(-(-count // batch))]

    def steps(self, sums: LossSums) -> LossSums:
        """Evaluate the batches after those of ``sums``; return the sums at the end or at a stop request."""
        recorder, batches = self.recorder, self.batches
        for name, step in batches[sums.steps :]:
            with recorder.timer("data"), self.pulse.during("fetching"):
                batch = self.data.evaluation(name, step)
            with recorder.timer("forward"):
                loss_sum, tokens = loss_over(self.prepared.passes, self.ranks, batch)
            sums = sums.plus(name, loss_sum, tokens)
            with recorder.timer("overhead"):
                stopping = self.stop.agree(sums.steps)
                last = sums.steps == len(batches)
                if self.ranks.rank == 0 and (stopping or last or recorder.is_log_step(sums.steps)):
                    with self.pulse.during("saving"):
                        sums.save(self.run_dir / "checkpoints", self.identity)
            recorder.step(sums.steps, loss_sum / max(tokens, 1), tokens=tokens)
            if stopping and not last:
                recorder.event("signal", name=self.stop.reason)
                break
        return sums
