"""The whole spec: one YAML file, as the user writes it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from partool.spec._base import OneOf, Section, shorthand
from partool.spec.adapter import AdapterSpec
from partool.spec.data import DataSpec
from partool.spec.evaluation import EvaluationSpec
from partool.spec.hardware import HardwareSpec, LimitsSpec
from partool.spec.launch import LaunchSpec
from partool.spec.model import ModelSpec
from partool.spec.parallel import ParallelSpec
from partool.spec.patterns import RunName
from partool.spec.telemetry import TelemetrySpec
from partool.spec.training import CheckpointSpec, KernelsSpec, OptimizerSpec, ResumeSpec, TrainingSpec
from partool.strategies.engines import ENGINES
from partool.strategies.jobs import JOBS


class Spec(Section):
    """A run: the model, the machines and the limits; ``auto`` leaves a choice to the planner."""

    spec: Literal[1] = 1
    """Version of this format."""
    engine: Annotated[str, OneOf(ENGINES)] = "partool"
    """Training system whose constants price the plan. Only partool trains what it plans; the others are for comparison
    with runs that were imported (``partool import``)."""
    job: Annotated[str, OneOf(JOBS)] = "train"
    """Kind of job: train, or evaluate, which computes the mean loss over the data, or runs tasks
    (docs/guide/evaluation.md)."""
    name: RunName | None = None
    """Name of the run; default: the file's name."""
    model: Annotated[ModelSpec, BeforeValidator(shorthand("preset"))]
    adapter: Annotated[AdapterSpec | None, BeforeValidator(shorthand("kind"))] = None
    hardware: Annotated[HardwareSpec, BeforeValidator(shorthand("accelerator"))] = HardwareSpec()
    parallel: ParallelSpec = ParallelSpec()
    training: TrainingSpec = TrainingSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    data: Annotated[DataSpec, BeforeValidator(shorthand("source"))]
    kernels: KernelsSpec = KernelsSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    resume: ResumeSpec = ResumeSpec()
    launch: LaunchSpec = LaunchSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    telemetry: TelemetrySpec = TelemetrySpec()
    limits: LimitsSpec = LimitsSpec()
