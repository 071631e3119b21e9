"""The plan: a spec with every choice made, with predictions and reasons. Its file can be hashed and compared."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import ValidationError, model_validator
from pydantic_core import PydanticCustomError

from partool.layout.parameters import priced_frozen
from partool.layout.sequence import Spans, shares
from partool.layout.sequence import tokens as tokens_of
from partool.layout.startrail import Trails
from partool.layout.tensor import Partition
from partool.plan.layout import Layout
from partool.plan.moved import with_moved_keys
from partool.plan.record import Record
from partool.plan.schedule import refuses
from partool.plan.soundness import (
    experts_contradiction,
    model_contradiction,
    partition_contradiction,
    schedule_contradiction,
)
from partool.plan.stopping import Stopping
from partool.plan.totals import Totals
from partool.plan.verification import Verification
from partool.spec._base import OneOf
from partool.spec.adapter import AdapterSpec
from partool.spec.data import DataSpec
from partool.spec.evaluation import EvaluationSpec
from partool.spec.hardware import Devices
from partool.spec.launch import LaunchSpec
from partool.spec.model import ModelConfig, Weights
from partool.spec.numbers import (
    LayersOrNone,
    Predicted,
    Rank,
    Ranks,
    Rate,
    Share,
    StepsOrNone,
)
from partool.spec.parallel import ParallelSpec
from partool.spec.patterns import FilePath, Identifier, ModuleName, RunName, Sha256, VariableName, VariableValue
from partool.spec.telemetry import TelemetrySpec
from partool.spec.training import CheckpointSpec, KernelsSpec, OptimizerSpec, ResumeSpec, TrainingSpec
from partool.strategies.jobs import JOBS
from partool.strategies.sequence import METHODS

PLAN_VERSION = 2
NOT_RUN = frozenset(
    {
        "prediction", "stopping", "alternatives", "candidates", "search", "answers", "limit", "reasons", "findings",
        "inputs", "spec", "partool_version", "generation", "verification",
    }
)  # fmt: skip
"""Fields of a plan that do not decide what runs."""


class RankMemory(Record):
    """Predicted peak memory of the ranks of one pipeline position."""

    pipeline_rank: LayersOrNone
    terms_bytes: dict[str, Predicted]
    """Bytes of each memory term in :data:`partool.plan.terms.MEMORY_TERMS`."""
    total_bytes: Predicted
    idle_bytes: Predicted = 0
    """See :attr:`MemoryPrediction.idle_bytes`."""


class MemoryPrediction(Record):
    """Predicted peak memory of one rank."""

    rank: Rank
    terms_bytes: dict[str, Predicted]
    """Bytes of each memory term in :data:`partool.plan.terms.MEMORY_TERMS`."""
    total_bytes: Predicted
    capacity_bytes: Predicted
    """Device memory minus the headroom."""
    fit_probability: Share
    """Probability that the true peak is below the device's memory (:mod:`partool.cost.memory.fit`)."""
    sigma_bytes: Predicted = 0
    """One standard deviation of the true peak around ``total_bytes``."""
    idle_bytes: Predicted = 0
    """Bytes beside ``total_bytes`` that the allocator holds for idle streams where there is room; it returns these
    bytes before it fails."""
    verdict: Literal["green", "amber", "red"] = "green"
    """green: fits with a probability of at least 90 %; amber: may fit; red: predicted above the device's memory."""
    ranks: tuple[RankMemory, ...] = ()
    """Memory terms of each pipeline rank, one entry per rank."""
    host_terms_bytes: dict[str, Predicted] = {}
    """Bytes of one rank's host memory by term of :data:`partool.plan.terms.HOST_TERMS`; empty without offload."""
    host_bytes: Predicted = 0
    """Bytes of host memory of all ranks of a node."""
    pinned_bytes: Predicted = 0
    """Bytes of pinned host memory of one rank."""
    saved_bytes: Predicted = 0
    """Bytes of a checkpoint that one rank writes, at most; 0 where the training system is another one."""
    saved_block_bytes: Predicted = 0
    """Bytes of the largest block of them."""


class ExchangePart(Record):
    """Steps of one kind of an optimizer that does not average gradients in every step."""

    steps: StepsOrNone
    """Number of such steps in the run."""
    sent_bytes: Predicted
    """Bytes that a rank sends to data-parallel ranks in one of them, for gradients or moves."""


class TimePrediction(Record):
    """Predicted time and traffic of one optimizer step."""

    terms_s: dict[str, Rate]
    """Seconds of each term in :data:`partool.plan.terms.TIME_TERMS`; their sum is the step time."""
    breakdown_s: dict[str, Rate] = {}
    """Seconds of each finer part in :data:`partool.plan.terms.TIME_PARTS`; the sum differs from the step time where
    parts overlap."""
    step_time_s: Rate
    tokens_per_s: Rate
    """Tokens per second over all ranks."""
    model_flops: Rate
    """FLOPs per optimizer step over all ranks, without recomputation."""
    mfu: Rate | None
    total_s: Rate
    """Seconds to the end of training."""
    device_hours: Rate
    traffic_bytes: dict[str, Predicted]
    """Bytes sent per rank and step, for each term in :data:`partool.plan.terms.TRAFFIC_TERMS`."""
    exchanges: dict[str, ExchangePart] = {}
    """By kind, the steps of an optimizer that does not average gradients in every step; empty for other optimizers."""


class Score(Record):
    """The figure by which layouts are ordered."""

    score_s: Rate
    """The step time in seconds, raised by all shares."""
    shares: dict[str, Rate]
    """Shares of the step time that are added to it: by mechanism, what its predictions err by; the risk not to fit,
    filled memory, and settings."""


class Prediction(Record):
    """All predictions, with their expected errors."""

    memory: MemoryPrediction
    """Prediction for the rank that needs most memory."""
    time: TimePrediction
    relative_error: Rate
    """Share of the predicted step time by which five in six such runs exceed it at most."""
    relative_error_below: Share | None = None
    """Share of the predicted step time by which five in six such runs fall short of it at most; None in plans that were
    made before the field existed."""
    evidence: str = ""
    """Runs that the errors rest on."""
    first_run_slowdown: Rate = 0.0
    """Share by which most first runs, which nobody has tuned, take longer than predicted; 0 where nothing is known."""
    first_run_evidence: str = ""
    """Origin of ``first_run_slowdown``."""
    memory_error: Rate = 0.0
    """Share of the predicted peak of memory by which five in six such runs exceeded it at most."""
    memory_evidence: str = ""
    """Runs that ``memory_error`` rests on."""
    time_scalar: Rate = 1.0
    """Ratio of measured to predicted step time of this machine's earlier runs; already contained in the times."""
    memory_scalar: Rate = 1.0
    """Ratio of measured to predicted memory; already contained in the memory terms."""
    score: Score | None = None
    """The figure by which the layout was taken; None in plans that were made before the field existed."""
    totals: Totals | None = None
    """Figures of the whole training; None in plans that were made before the field existed."""

    @property
    def upper_step_s(self) -> float:
        """Step time at its upper error bar, in seconds."""
        return self.time.step_time_s * (1 + self.relative_error)

    @property
    def first_run_step_s(self) -> float:
        """Step time of most first runs, in seconds."""
        return self.time.step_time_s * (1 + self.first_run_slowdown)


class Alternative(Record):
    """A layout that was considered and not chosen."""

    role: str = ""
    """Reason why the layout is listed, such as ``faster on paper`` or ``128 devices``; empty for the next best."""
    devices: Predicted = 0
    """Number of devices that the layout uses; 0 in plans that were made before the field existed."""
    summary: str
    step_time_s: Rate | None
    score_s: Rate | None = None
    """Seconds by which layouts are ordered; None in plans that were made before the field existed."""
    memory_bytes: Predicted | None
    runnable: bool
    why_not: str
    change: str
    """YAML text of the section ``parallel`` of a spec that gives this layout on ``devices`` devices."""


class PlanAnswer(Record):
    """A short answer to one question of a reader of a plan."""

    question: str
    """The question in a word or two: ``Fits``, ``Why``, ``Next best``, ``Limit``, ``Sure``."""
    text: str


class CandidateRow(Record):
    """One priced layout, for tables and plots; the plan's own layout is among them."""

    summary: str
    step_time_s: Rate
    score_s: Rate | None = None
    """Seconds by which layouts are ordered; None in plans that were made before the field existed."""
    memory_bytes: Predicted
    """Bytes of peak device memory on the fullest rank."""
    host_bytes: Predicted = 0
    """Bytes of host memory per node."""
    devices: Ranks
    fit_probability: Share
    verdict: Literal["green", "amber", "red"]
    runnable: bool
    pareto: bool = False
    """True if the layout is on the Pareto front over time, memory and devices."""
    why_not: str = ""
    """Reason why the layout was not chosen; empty for the plan's own layout."""


class SearchSummary(Record):
    """Counts of layouts in the search."""

    enumerated: Predicted
    """Number of all combinations of the choices that the spec does not fix."""
    pruned: dict[str, Predicted] = {}
    """Number of layouts excluded before pricing, by reason."""
    evaluated: Predicted
    """Number of layouts whose memory and lower bound of the step time were computed with the closed equations."""
    fitting: Predicted
    """Number of evaluated layouts that fit into memory."""
    simulated: Predicted
    """Number of layouts that were priced exactly, with balanced stages and a simulated schedule."""


class Finding(Record):
    """A warning that is stored with the plan."""

    code: str
    message: str


class Variable(Record):
    """An environment variable of every rank, and its origin."""

    name: VariableName
    value: VariableValue
    origin: str
    """Origin: ``launch.env``, a network preset with its source, or partool with the reason."""


class HfModel(Record):
    """A model that transformers builds."""

    path: FilePath
    """Folder of its ``config.json``, absolute."""
    model_type: Identifier
    architecture: Identifier
    """Name of the model's class in transformers, such as ``LlamaForCausalLM``."""
    code_hash: Sha256 = ""
    """Hash of the code in the folder that builds the model (:func:`partool.spec.model_code.code_hash`), which the user
    has allowed on the command line; empty if transformers needs no code from the folder."""


class ModuleModel(Record):
    """A module of the user's own."""

    module: ModuleName
    """``package.module:Class``."""
    config: dict[str, Any] = {}
    """Keywords of the class's constructor."""
    folder: FilePath
    """Folder of the spec, absolute; modules that are not installed are looked for here."""
    files: dict[FilePath, Sha256] = {}
    """Hash of each file of the user's code that building and running the module loads, by its place below the folder
    that it is imported from. The user has allowed these files on the command line."""


class TeacherModel(Record):
    """The model whose predictions the trained one learns (``training.distill``); partool's own decoder."""

    model: ModelConfig
    weights: Weights
    """Source of its weights; the path is absolute."""
    partition: tuple[Partition, ...] = ()
    """How tensor-parallel ranks share each of its parameters; empty without tensor parallelism."""


class Generation(Record):
    """Settings for generating text with the model; exports copy the settings, training ignores them."""

    token_ids: dict[Literal["bos_token_id", "eos_token_id", "pad_token_id"], int | list[int] | None] = {}
    """Token ids as in ``config.json``."""
    settings: dict[str, Any] = {}
    """The content of ``generation_config.json``; empty if there is none."""


class Plan(Record):
    """The run as it was planned: layout, predictions and reasons."""

    plan_version: Literal[2] = 2
    partool_version: str
    job: Annotated[str, OneOf(JOBS)] = "train"
    """Kind of job (:data:`partool.strategies.jobs.JOBS`)."""
    name: RunName
    model: ModelConfig
    model_source: str
    """Source of the model's fields: a preset, a file, or the spec."""
    hf: HfModel | None = None
    """The model that transformers builds; ``model`` then describes it for the predictions only."""
    module: ModuleModel | None = None
    """The user's own module, if it is the model."""
    generation: Generation | None = None
    """Settings for generating text, from the folder of ``model.config``; None if there are none."""
    weights: Weights
    frozen: tuple[str, ...] = ()
    """Patterns of the names of parameters that are not trained, with an adapter all that it leaves."""
    adapter: AdapterSpec | None = None
    """The adapter whose matrices are trained; ``weights`` is absolute."""
    teacher: TeacherModel | None = None
    """The frozen model that teaches the trained one; None without ``training.distill``."""
    devices: Devices
    layout: Layout
    partition: tuple[Partition, ...] = ()
    """How tensor-parallel ranks share each parameter; empty without tensor parallelism."""
    training: TrainingSpec
    optimizer: OptimizerSpec = OptimizerSpec()
    data: DataSpec
    """Data settings; paths are absolute."""
    kernels: KernelsSpec
    checkpoint: CheckpointSpec = CheckpointSpec()
    resume: ResumeSpec = ResumeSpec()
    launch: LaunchSpec
    evaluation: EvaluationSpec = EvaluationSpec()
    telemetry: TelemetrySpec = TelemetrySpec()
    """Trackers of the run; paths are absolute."""
    environment: tuple[Variable, ...] = ()
    """Variables of every rank, one entry per name, sorted; secrets are only named, in ``launch.secrets``."""
    prediction: Prediction
    stopping: Stopping | None = None
    """Time that a stop needs, from which ``launch.shutdown_timeout_s`` follows where the spec leaves that open; None in
    plans that were made before the field existed."""
    alternatives: tuple[Alternative, ...] = ()
    candidates: tuple[CandidateRow, ...] = ()
    """Priced layouts, best score first, including the whole Pareto front over time, memory and devices."""
    search: SearchSummary | None = None
    answers: tuple[PlanAnswer, ...] = ()
    """What a reader asks first, in seven lines of a terminal at most; empty in plans that were made before the field
    existed."""
    limit: str = ""
    """Text that names the constraint that limits the layout, and the term that would have to shrink."""
    reasons: tuple[str, ...] = ()
    """Reasons for this layout: one sentence each."""
    findings: tuple[Finding, ...] = ()
    verification: Verification | None = None
    """Findings of a dry run of the plan's code (``partool plan --verify``), which also corrected the predicted memory;
    None without a dry run."""
    runnable: bool
    not_runnable: tuple[str, ...] = ()
    """Codes of the rules about features of this plan that the runtime cannot run yet."""
    spec: dict[str, Any]
    """The spec that the user wrote, with the overrides applied."""
    inputs: dict[str, str] = {}
    """SHA-256 of each input by name, such as spec, catalog and model configuration."""

    @model_validator(mode="after")
    def _has_what_its_job_reads(self) -> Plan:
        for name in ("optimizer", "checkpoint"):
            if name not in self.model_fields_set and name not in JOBS[self.job].unread:
                raise PydanticCustomError("missing", "Field required", {"field": name})
        return self

    @property
    def _unread(self) -> dict[str, Any]:
        """Fields that the plan's job does not read: its file leaves them out."""
        excluded: dict[str, Any] = {}
        for path in JOBS[self.job].unread:
            section, _, name = path.partition(".")
            excluded[section] = excluded.get(section, {}) | {name: True} if name else True
        return excluded

    @property
    def contradiction(self) -> str:
        """The first contradiction of an edited plan, in words; empty where there is none."""
        ranks, devices = self.layout.mesh.world_size, self.devices.nodes * self.devices.per_node
        if ranks != devices:
            return f"the degrees of layout make {ranks} ranks, devices are {devices}"
        layout, wanted = self.layout, self.training.global_batch
        batch = layout.micro_batch * layout.derived.accumulation * layout.mesh.dp
        if batch != wanted:
            parts = "layout.micro_batch × layout.derived.accumulation × data-parallel ranks"
            return f"{parts} is {batch}, training.global_batch is {wanted}"
        blocks, named = self.model.blocks, sum(self.layout.pipeline.layers)
        if named != blocks:
            return f"layout.pipeline.layers names {named} layers, the model has {blocks}"
        try:
            _ = self.asked
        except ValidationError as error:
            item = error.errors(include_url=False)[0]
            return f"{'.'.join(map(str, ('spec.parallel', *item['loc'])))}: {item['msg']}"
        if contradiction := self.layout.contradiction:
            return contradiction
        if why := refuses(self.layout, self.layout.derived.accumulation):
            return f"layout.pipeline: {why}"
        if self.runnable == bool(self.not_runnable):
            codes = ", ".join(self.not_runnable) or "no code"
            return f"runnable is {str(self.runnable).lower()}, and not_runnable names {codes}"
        return (
            schedule_contradiction(self.layout)
            or model_contradiction(self.model, self.training.sequence_length)
            or experts_contradiction(self.model, self.layout, self.devices.joined)
            or (partition_contradiction(self.model, self.layout, self.partition) if self.own_decoder else "")
        )

    @property
    def at_most(self) -> str:
        """``at most `` where the job may end before its last step, with the end of its data or by an early stop."""
        certain = JOBS[self.job].backward and self.training.early_stop is None
        return "" if certain else "at most "

    @property
    def judges_by_tasks(self) -> bool:
        """Whether the job runs tasks in place of its data, so that nothing is known of its length."""
        return bool(self.evaluation.tasks) and not JOBS[self.job].backward

    @property
    def own_decoder(self) -> bool:
        """Whether the model is partool's own decoder, which alone has the parameter names of ``layout.parameters``."""
        return self.hf is None and self.module is None

    @property
    def priced_frozen(self) -> tuple[str, ...]:
        """Patterns of the parameters that are not trained in the model that the predictions are of."""
        return priced_frozen(self.model, self.frozen, self.adapter, partools=self.own_decoder)

    @property
    def code(self) -> str:
        """Place of the code that builds the model and that the user must allow; empty if no such code is needed."""
        if self.module is not None:
            return self.module.module
        return self.hf.path if self.hf is not None and self.hf.code_hash else ""

    @property
    def engine(self) -> str:
        """Name of the training system that the plan is for (:data:`partool.strategies.engines.ENGINES`)."""
        return str(self.spec.get("engine", "partool"))

    @property
    def asked(self) -> ParallelSpec:
        """The section ``parallel`` as the user wrote it; raises ``pydantic.ValidationError`` where it was edited."""
        return ParallelSpec.model_validate(self.spec.get("parallel", {}))

    @property
    def shares(self) -> tuple[Spans, ...]:
        """For each sequence-parallel rank, the spans of tokens of a sequence that the rank holds."""
        sequence, grid = self.layout.sequence, self.model.grid
        spans = shares(
            self.training.sequence_length,
            sequence.degree,
            sequence.order,
            inner=sequence.ulysses,
            columns=grid[1] if grid else 0,
        )
        if METHODS[sequence.method].keys == "teams" and sequence.degree > 1:
            return Trails(sequence.degree, sequence.teams, sequence.inside).by_rank(spans)
        return spans

    @property
    def tokens(self) -> int:
        """Number of tokens of a micro-batch on the rank that holds the most tokens."""
        return self.layout.micro_batch * max(tokens_of(share) for share in self.shares)

    def to_json(self) -> str:
        """Return the plan as JSON with sorted keys, without what its job does not read, ending in a newline."""
        return json.dumps(self.model_dump(mode="json", exclude=self._unread), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan; raises ``pydantic.ValidationError`` where it is malformed or of another version."""
        return cls.model_validate_json(with_moved_keys(text))

    def deciding(self) -> dict[str, Any]:
        """Return all values that decide what runs, as nested dictionaries without origins and reasons."""
        words: dict[str, Any] = {"partition": {"__all__": {"rule", "why"}}}
        return self.model_dump(mode="json", exclude=self._unread | words | dict.fromkeys(NOT_RUN, True))

    @property
    def hash(self) -> str:
        """SHA-256 of all values that decide what runs; predictions, reasons and alternatives do not count."""
        return hashlib.sha256(json.dumps(self.deciding(), sort_keys=True).encode()).hexdigest()
