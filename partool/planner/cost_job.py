"""The input of the cost functions for a problem's layouts."""

from __future__ import annotations

from partool.catalog.profile import Applied
from partool.cost.training.one_bit import one_bit_updates
from partool.cost.training.optimizer import adapted, matrix_updates, moments_of
from partool.planner.allocator import expandable
from partool.planner.kernels.fused import fused
from partool.planner.problem import Problem
from partool.spec.parallel import Compile
from partool.work.blocks import divided_model
from partool.work.distillation import with_teacher
from partool.work.evaluation import forward_only
from partool.work.stacks import stack_of
from partool.work.training import TrainingWork


def cost_job(problem: Problem, compile: Compile | None = None) -> TrainingWork:
    """Return the cached input of the cost functions for layouts with this ``compile`` (None: the problem's setting)."""
    compile = compile or problem.compile
    if compile not in problem.jobs:
        problem.jobs[compile] = _job(problem, compile)
    return problem.jobs[compile]


def _job(problem: Problem, compile: Compile) -> TrainingWork:
    training, measured = problem.spec.training, problem.measured
    if measured is None or measured.devices.accelerator != problem.devices.accelerator:
        measured = Applied(problem.devices)
    work = TrainingWork(
        model=divided_model(problem.model),
        devices=problem.devices,
        sequence_length=training.sequence_length,
        global_batch=training.global_batch,
        precision=training.precision,
        stack=stack_of(problem.spec.engine, problem.devices.backend, compile, fused(problem, compile)),
        trace=problem.trace,
        frozen=problem.priced_frozen,
        time_scalar=measured.time_scalar,
        memory_scalar=measured.memory_scalar,
        memory_runs=measured.memory.n if measured.memory else 0,
        memory_spread=measured.memory.spread if measured.memory else 0.0,
        lists=problem.lists,
        stage_layers=problem.stage_layers,
        recompute=tuple(listed) if isinstance(listed := problem.spec.parallel.recompute, list) else None,
        expandable_segments=expandable(problem.spec.launch, problem.devices),
        controls=problem.controls,
        expert_imbalance=problem.spec.limits.expert_imbalance,
        expert_rank_capacity=problem.spec.parallel.rank_capacity,
        moments=moments_of(problem.spec.optimizer),
        matrices=matrix_updates(problem.spec.optimizer, training.precision),
        averages=training.ema is not None,
        one_bit=one_bit_updates(problem.spec.optimizer, training, problem.spec.checkpoint, problem.spec.data.validates),
        adapt=adapted(problem.spec.optimizer),
        shared_elements=0 if problem.described is None else problem.described.structure.shared_elements(),
        perturbed=training.adversarial.share(training.steps),
        offload=problem.offload,
    )
    if problem.job.backward:
        work = with_teacher(work, problem.teacher, training)
    return work.with_objective(training.objective) if problem.job.backward else forward_only(work)
