"""The training job, which is the work of one rank from the plan to the last checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import torch

from partool.plan.types import Plan
from partool_runtime.checkpoint import open_arena
from partool_runtime.data import Batches, open_data
from partool_runtime.errors import EXIT_DONE, EXIT_PREEMPTED, Preempted
from partool_runtime.fused.self_check import with_working_parts
from partool_runtime.jobs.process import configure_process, watch_compiler
from partool_runtime.jobs.train.loop import TrainingLoop, report_write, reports_loads
from partool_runtime.jobs.train.reference import give_reference
from partool_runtime.jobs.train.sampling import PromptSampler
from partool_runtime.jobs.train.saving import Saver
from partool_runtime.jobs.train.stepping import Stepper
from partool_runtime.jobs.train.tasks import TrainingTasks
from partool_runtime.jobs.train.validating import Validator
from partool_runtime.mesh import Ranks, close_ranks, open_ranks
from partool_runtime.model import Decoder
from partool_runtime.offload.install import open_optimizer
from partool_runtime.optim.types import Optimizer
from partool_runtime.parallel.comm import maximum_over
from partool_runtime.parallel.teacher import Teacher
from partool_runtime.precision import LossScaler
from partool_runtime.preparation import Prepared, prepare
from partool_runtime.pulse import SILENT, Pulse
from partool_runtime.resuming import falls_back
from partool_runtime.stop import StopRequest
from partool_runtime.telemetry import Recorder
from partool_runtime.telemetry.profile import StepProfiler
from partool_runtime.torch_internals.tensors import local, local_bytes
from partool_runtime.weights import checksum, fill, frozen_of, post_load


def train(plan: Plan, run_dir: Path, resume: bool, stop: StopRequest, pulse: Pulse = SILENT) -> None:
    """Run the plan on this rank; ``resume`` continues from the newest checkpoint in ``run_dir``.

    Raises Preempted after a stop request, when the checkpoint is written, and ConfigurationError for an error that no
    retry fixes. After an error the process group stays open, because closing the group would wait for ranks that may
    have ended.
    """
    configure_process(plan)
    ranks = open_ranks(plan)
    stop.use(lambda value: maximum_over(value, ranks.world, ranks.device))
    with Recorder(
        plan, run_dir, rank=ranks.rank, world_size=ranks.world_size, device=ranks.device, pulse=pulse
    ) as recorder:
        pulse.enter("loading")
        data = open_data(plan, dp_rank=ranks.dp.place, dp_size=ranks.dp.size, barrier=ranks.barrier)
        for note in data.notes:
            recorder.warning(note)
        pulse.enter("preparing")
        watch_compiler(plan, pulse)
        prepared = prepare(with_working_parts(plan, ranks, recorder.warning), ranks, recorder.pipeline)
        sampler = PromptSampler.of(plan, ranks, prepared)
        tasks = TrainingTasks(plan, run_dir, ranks, scoring=prepared.scoring, recorder=recorder, pulse=pulse)
        stepper, saver, first = _open(
            plan, run_dir, ranks, recorder, prepared=prepared, data=data, resume=resume, pulse=pulse
        )
        attempt = int(os.environ.get("PARTOOL_ATTEMPT", "1"))
        recorder.event("start", attempt=attempt, world_size=ranks.world_size, plan_hash=plan.hash, resumed_from=first)
        if first >= plan.training.steps and ranks.rank == 0:
            print(f"nothing to do: the checkpoint holds {first} steps, training.steps is {plan.training.steps}")
        tasks.begin(lambda: stop.agree(first))
        pulse.enter("training")
        planned, warn = plan.telemetry.profile, recorder.warning
        profiler = StepProfiler(run_dir, ranks.rank, ranks.device, planned=planned, warn=warn)
        validator = Validator(plan, stepper, data, stop, pulse, sampler, tasks)
        reports = reports_loads(plan, ranks)
        loop = TrainingLoop(plan, stepper, data, saver, recorder, stop, profiler, validator, pulse, reports)
        with closing(profiler), closing(tasks):
            steps_done, early = loop.steps(first)
        data.close()
        with pulse.during("saving"):
            saver.close()
        pulse.enter("ending")
        _report_host(stepper.optimizer, recorder)
        stepper.optimizer.close()
        prepared.passes.close()
        prepared.memory.close()
        report_write(saver, recorder)
        stopped = steps_done < plan.training.steps and not early
        recorder.close(EXIT_PREEMPTED if stopped else EXIT_DONE, stop.reason if stopped else early or "all steps done")
    close_ranks(ranks)
    if stopped:
        raise Preempted(f"stopped by {stop.reason} after step {steps_done}")


def _open(
    plan: Plan,
    run_dir: Path,
    ranks: Ranks,
    recorder: Recorder,
    *,
    prepared: Prepared,
    data: Batches,
    resume: bool,
    pulse: Pulse,
) -> tuple[Stepper, Saver, int]:
    """Load the state from the newest checkpoint or the plan's weights; return stepper, saver and the first step."""
    model = prepared.model
    arena = open_arena(ranks.device, prepared.memory, _room_bytes(plan))  # the optimizer freezes the memory
    optimizer = open_optimizer(plan, prepared, ranks)
    _count_memory(prepared, optimizer, ranks.device, recorder)
    scaler = LossScaler(plan.training.precision == "fp16")
    stepper = Stepper(
        prepared.passes,
        optimizer,
        scaler,
        ranks=ranks,
        training=plan.training,
        spec=plan.optimizer,
        kernels=plan.kernels.mode,
        loads=prepared.loads,
        preferences=prepared.preferences,
        teacher=prepared.teacher,
        multi_token=model.multi_token if isinstance(model, Decoder) and model.predictions else None,
    )

    folder = None if plan.adapter is None else plan.adapter.weights

    def start() -> None:
        """Give the model the weights that training starts from."""
        masters, group = optimizer.masters(), ranks.world
        for note in fill(model, plan.weights, seed=plan.training.seed, masters=masters, adapter=folder, group=group):
            recorder.warning(note)
        optimizer.loaded()
        post_load(model)
        if optimizer.average is not None:
            optimizer.average.restart()

    base = ""
    if plan.adapter is not None:  # checkpoints hold no frozen weights
        start()
        base = checksum(model, frozen_of(model, plan.frozen), ranks.world)
    saver = Saver(
        plan,
        run_dir,
        ranks,
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        stepper=stepper,
        fingerprint=data.fingerprint,
        arena=arena,
        base=base,
    )
    if (copy := prepared.frozen_copy) is not None:
        fill(copy.model, plan.weights, seed=plan.training.seed, adapter=folder, group=ranks.world)
        post_load(copy.model)
    pulse.enter("loading")
    started = give_reference(plan, run_dir, ranks, prepared=prepared, data=data, start=start, pulse=pulse)
    fallback = falls_back(plan.resume.fallback, plan.launch.target, os.environ)
    first = saver.resume(fallback=fallback) if resume else saver.begin(0)
    for note in saver.notes:
        recorder.warning(note)
    if first > 0:  # a resumed run does not need its initial weights
        optimizer.loaded()
        post_load(model)
    elif not started and plan.adapter is None:
        start()
    _start_teacher(plan, prepared.teacher, ranks, first)
    return stepper, saver, first


def _start_teacher(plan: Plan, teacher: Teacher | None, ranks: Ranks, first: int) -> None:
    """Give the teacher its weights, or drop it if step ``first`` comes after its last one; a collective."""
    if teacher is None or plan.teacher is None:
        return
    teacher.at(first)
    if teacher.model is not None:
        fill(teacher.model, plan.teacher.weights, seed=plan.training.seed, group=ranks.world)
        post_load(teacher.model)


def _room_bytes(plan: Plan) -> int | None:
    """Return the pinned memory that the plan leaves below the user's limit; None without a limit."""
    limit = plan.layout.offload.pinned_limit_bytes
    return max(0, limit - plan.prediction.memory.pinned_bytes) if limit else None


def _count_memory(prepared: Prepared, optimizer: Optimizer, device: torch.device, recorder: Recorder) -> None:
    """Give the recorder the bytes of each kind of device memory, and report the optimizer's notes to the user."""
    for note in optimizer.notes:
        recorder.warning(note)
    models = [prepared] if prepared.frozen_copy is None else [prepared, prepared.frozen_copy]
    teacher = prepared.teacher
    in_teacher = [] if teacher is None or teacher.model is None else [teacher.model]
    every = [*(each.model for each in models), *in_teacher]
    recorder.note_memory("parameters", sum(_bytes_on(device, model.parameters()) for model in every))
    recorder.note_memory("optimizer", optimizer.state_bytes())
    if optimizer.average is not None:
        recorder.note_memory("average", optimizer.average.state_bytes())
    gathering = [each.gathered_bytes for each in models] + ([] if teacher is None else [teacher.gathered_bytes])
    recorder.probe_memory("gathered", lambda: sum(gathered_bytes() for gathered_bytes in gathering))
    recorder.probe_memory("gradients", lambda: prepared.gradient_bytes() + optimizer.gradient_bytes())


def _report_host(optimizer: Optimizer, recorder: Recorder) -> None:
    """If the optimizer has a report, record it as the event ``offload``, and record the optimizer's host memory."""
    if report := optimizer.report():
        recorder.note_host_memory(optimizer.held_bytes())
        recorder.event("offload", **report)


def _bytes_on(device: torch.device, tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of this rank's parts of ``tensors``; parts outside of ``device`` are not counted."""
    return local_bytes(tensor for tensor in tensors if local(tensor).device == device)
