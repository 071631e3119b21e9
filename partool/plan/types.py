"""The Plan: a spec with nothing left open, its predictions and the reasons. A file, hashable and diffable."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from partool.layout.sequence import Order, Spans, shares
from partool.layout.sequence import tokens as tokens_of
from partool.layout.startrail import Trails
from partool.layout.tensor import Partition
from partool.spec.hardware import Devices
from partool.spec.launch import LaunchSpec
from partool.spec.model import ModelConfig, Weights
from partool.spec.numbers import (
    Bytes,
    Cores,
    Elements,
    Experts,
    Layers,
    LayersOrNone,
    Pieces,
    Predicted,
    Rank,
    Ranks,
    Rate,
    Sequences,
    Share,
    StepsOrNone,
    TensorRanks,
    TokensOrNone,
)
from partool.spec.parallel import (
    Compile,
    Gather,
    Host,
    Inside,
    Recompute,
    SequenceMethod,
    TensorOverlap,
    Tier,
    ZeroStage,
)
from partool.spec.patterns import FilePath, Identifier, RunName, Sha256, VariableName, VariableValue
from partool.spec.training import CheckpointSpec, DataSpec, Fused, KernelsSpec, OptimizerSpec, TrainingSpec

PLAN_VERSION = 1
NOT_RUN = frozenset(
    {
        "prediction", "alternatives", "candidates", "search", "limit", "reasons", "findings", "inputs", "spec",
        "partool_version", "generation",
    }
)  # fmt: skip
"""Fields of a plan that do not decide what runs."""


class Record(BaseModel):
    """A part of the plan: closed and frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, allow_inf_nan=False)


class Mesh(Record):
    """Dense mesh axes, outermost first; they multiply to the world size. Rank order is row-major over this order."""

    pp: Layers = 1
    dp_replicate: Ranks = 1
    dp_shard: Ranks = 1
    cp: Ranks = 1
    tp: TensorRanks = 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks (replicas times shards)."""
        return self.dp_replicate * self.dp_shard


class HostWork(Record):
    """How what is offloaded is moved and updated; see ``parallel.offload`` of the spec."""

    speculate: Literal["none", "deferred", "undo"] = "none"
    undo_bytes: Bytes = 0
    """Per rank."""
    gradients: Literal["compute", "master"] = "compute"
    """Type in which gradients travel: that of computation, or that of masters."""
    moments: Literal["master", "bf16"] = "master"
    bucket_bytes: Bytes = 2**26
    """Of gradients, in the type in which they travel."""
    threads: Cores = 1
    """Per rank."""
    folder: FilePath | Literal[""] = ""
    """Absolute; empty where nothing goes to disks."""
    buffers: Pieces = 4
    """Buckets of a state on disks that are in host memory at once."""
    pinned_bytes: Bytes = 0
    """Most pinned memory of a rank; 0: no limit."""


class Layout(Record):
    """How the work is split over ranks and time."""

    mesh: Mesh
    expert: Experts = 1
    zero: ZeroStage
    micro_batch: Sequences
    """Sequences per rank and forward pass."""
    accumulation: Sequences
    """Micro-batches per rank and optimizer step."""
    recompute: tuple[Recompute, ...]
    """One policy per layer."""
    compile: Compile
    stages: tuple[tuple[LayersOrNone, Layers], ...]
    """First and one-past-last layer of each of the ``pp`` × ``chunks`` pipeline stages, in their order."""
    schedule: str = "1f1b"
    """Name in :data:`partool.schedule.SCHEDULES`, or ``file``."""
    chunks: Layers = 1
    """Stages per pipeline rank (virtual stages of interleaved schedules; two per wave of Hanayo)."""
    in_flight: StepsOrNone = 0
    """Most micro-batches that the schedule may hold on a rank; 0: as many as its generator wants."""
    schedule_text: str = ""
    """With the schedule ``file``, the user's own lists in full (:func:`partool.schedule.from_text`)."""
    schedule_hash: Sha256 = ""
    """SHA-256 of the schedule's text, for pipelines of more than one rank: what was planned is what runs. Empty for
    lists of more than 50,000 passes."""
    tensor_inner: TensorRanks = 1
    """d2 of the d1 × d2 tensor ranks in two-dimensional tensor parallelism (ATP, arXiv 2301.08658): the axis ``tp`` of
    the mesh is ``tp0`` × ``tp1``, ``tp1`` of this size and innermost."""
    sequence_norms: bool = False
    """Norms and residuals work on a share of the sequence per tensor rank."""
    tensor_overlap: TensorOverlap = "none"
    tensor_chunks: Pieces = 1
    """Pieces of a micro-batch whose sums travel while the next is multiplied."""
    gather: Gather = "coalesced"
    prefetch: LayersOrNone = 1
    """With ZeRO-3, layers gathered ahead of the one that computes."""
    persistent_elements: Elements = 0
    """With ZeRO-3, parameters of at most so many elements stay gathered."""
    leaves: tuple[str, ...] = ()
    """Glob patterns of modules that are gathered as one unit and whose missing gradients are filled with zeros."""
    sequence_method: SequenceMethod = "ulysses"
    sequence_order: Order = "contiguous"
    """Which tokens a sequence-parallel rank holds (:func:`partool.layout.sequence.shares`)."""
    sequence_inner: Ranks = 1
    """With ``usp``: neighbouring ranks that trade sequence for heads, of the ``cp`` of the mesh."""
    sequence_teams: Ranks = 1
    """With ``startrail``: ranks of a team (C)."""
    sequence_inside: Inside = "teams"
    """With ``startrail``: which of both neighbouring ranks form."""
    mlp_tile_tokens: TokensOrNone = 0
    """Tokens of a sequence that pass a feed-forward network at once; 0: all."""
    loss_tile_tokens: TokensOrNone = 0
    """Tokens whose logits exist at once; 0: as many as the runtime's own limit allows."""
    fused: tuple[Fused, ...] = ()
    """Parts of the model that kernels of partool compute, see ``kernels.fused`` of the spec."""
    offload_optimizer: Tier = "none"
    gpu_fraction: Share = 0.0
    """Share of the optimizer state that stays on the device while ``offload_optimizer`` is not none."""
    offload_parameters: Tier = "none"
    offload_activations: Host = "none"
    host: HostWork = HostWork()
    """How the host's part of the work is done; of no meaning where nothing is offloaded."""

    @property
    def offloads(self) -> bool:
        """Whether anything is in host memory or on its disks."""
        return {self.offload_optimizer, self.offload_parameters, self.offload_activations} != {"none"}

    @property
    def sequence_form(self) -> str:
        """How ranks share a sequence, in words: the method, with the sizes of its groups where it has several."""
        ranks, method = self.mesh.cp, self.sequence_method
        if method == "usp":
            return f"usp, {self.sequence_inner} ulysses × {ranks // self.sequence_inner} ring"
        if method == "startrail":
            rings = ranks // self.sequence_teams**2
            return f"startrail, teams of {self.sequence_teams}, rings of {rings}"
        return method


class RankMemory(Record):
    """Predicted peak memory of the ranks of one pipeline position."""

    pipeline_rank: LayersOrNone
    terms_bytes: dict[str, Predicted]
    """Keys from :data:`partool.plan.terms.MEMORY_TERMS`."""
    total_bytes: Predicted


class MemoryPrediction(Record):
    """Predicted peak memory of one rank."""

    rank: Rank
    terms_bytes: dict[str, Predicted]
    """Keys from :data:`partool.plan.terms.MEMORY_TERMS`."""
    total_bytes: Predicted
    capacity_bytes: Predicted
    """Device memory less the headroom."""
    fit_probability: Share
    """Probability that the true peak stays under the device's memory."""
    sigma_bytes: Predicted = 0
    """One standard deviation of the true peak around ``total_bytes``."""
    verdict: Literal["green", "amber", "red"] = "green"
    """green: sure to fit (at least 99 %); amber: may fit; red: predicted above the device's memory."""
    ranks: tuple[RankMemory, ...] = ()
    """One entry per pipeline rank: its terms."""
    host_terms_bytes: dict[str, Predicted] = {}
    """Of host memory, of one rank; keys from :data:`partool.plan.terms.HOST_TERMS`. Empty where nothing leaves."""
    host_bytes: Predicted = 0
    """Of host memory, of all ranks of a node."""
    pinned_bytes: Predicted = 0
    """Of one rank's host memory, what its device reaches by itself."""


class TimePrediction(Record):
    """Predicted time and traffic of one optimizer step."""

    terms_s: dict[str, Rate]
    """Keys from :data:`partool.plan.terms.TIME_TERMS`; they sum to the step time."""
    breakdown_s: dict[str, Rate] = {}
    """Finer parts of the terms, keys from :data:`partool.plan.terms.TIME_PARTS`; parts that overlap do not sum up."""
    step_time_s: Rate
    tokens_per_s: Rate
    """Over all ranks."""
    model_flops: Rate
    """Per optimizer step, over all ranks, without recomputation."""
    mfu: Rate | None
    total_s: Rate
    """To the end of training."""
    device_hours: Rate
    traffic_bytes: dict[str, Predicted]
    """Keys from :data:`partool.plan.terms.TRAFFIC_TERMS`; sent per rank and step."""


class Prediction(Record):
    """Everything predicted, with how far it may be off."""

    memory: MemoryPrediction
    """Of the rank that needs most."""
    time: TimePrediction
    relative_error: Rate
    """One standard deviation of the step time, from the data the model was checked on."""
    time_scalar: Rate = 1.0
    """Measured over predicted step time of this machine's earlier runs; the times hold it already."""
    memory_scalar: Rate = 1.0
    """The same for memory."""


class Alternative(Record):
    """A layout that was considered and not taken."""

    summary: str
    step_time_s: Rate | None
    memory_bytes: Predicted | None
    runnable: bool
    why_not: str
    change: str
    """What to write into the spec to get it."""


class CandidateRow(Record):
    """One priced layout, for tables and plots; the plan's own is among them."""

    summary: str
    step_time_s: Rate
    memory_bytes: Predicted
    """Of the fullest rank."""
    host_bytes: Predicted = 0
    """Of host memory, per node."""
    devices: Ranks
    fit_probability: Share
    verdict: Literal["green", "amber", "red"]
    runnable: bool
    pareto: bool = False
    """True if no other layout needs less of time, memory and devices together."""
    why_not: str = ""
    """Empty for the plan's own layout."""


class SearchSummary(Record):
    """How the layout was found. Counts are of layouts."""

    enumerated: Predicted
    """Every combination of the choices that the spec leaves open."""
    pruned: dict[str, Predicted] = {}
    """Left out before pricing, by reason."""
    evaluated: Predicted
    """Priced with the closed equations: memory, and a lower bound of the step time."""
    fitting: Predicted
    """Of those, how many fit."""
    simulated: Predicted
    """Priced exactly: stages balanced, schedule simulated."""


class Finding(Record):
    """A warning that travels with the plan."""

    code: str
    message: str


class Variable(Record):
    """An environment variable of every rank, and who set it."""

    name: VariableName
    value: VariableValue
    origin: str
    """``launch.env``, a network preset with its source, or partool with the reason."""


class HfModel(Record):
    """A model that transformers builds."""

    path: FilePath
    """Folder of its ``config.json``, absolute."""
    model_type: Identifier
    architecture: Identifier
    """Class of transformers, such as ``LlamaForCausalLM``."""
    code_hash: Sha256 = ""
    """Of the code in the folder that builds the model (:func:`partool.spec.model_code.code_hash`), which the command
    line has allowed; empty: transformers builds it without."""


class Generation(Record):
    """What an export says to those who generate text with the model; training does not look at it."""

    token_ids: dict[Literal["bos_token_id", "eos_token_id", "pad_token_id"], int | list[int] | None] = {}
    """As in ``config.json``."""
    settings: dict[str, Any] = {}
    """The content of ``generation_config.json``; empty: there is none."""


class Plan(Record):
    """What will run, why, and what it is expected to need."""

    plan_version: Literal[1] = 1
    partool_version: str
    job: Literal["train"] = "train"
    name: RunName
    model: ModelConfig
    model_source: str
    """Where the model's fields came from: a preset, a file, or the spec."""
    hf: HfModel | None = None
    """Where transformers builds the model; ``model`` then describes it for the predictions only."""
    generation: Generation | None = None
    """From the folder of ``model.config``."""
    weights: Weights
    frozen: tuple[str, ...] = ()
    devices: Devices
    layout: Layout
    partition: tuple[Partition, ...] = ()
    """How tensor-parallel ranks share each parameter; empty without tensor parallelism."""
    training: TrainingSpec
    optimizer: OptimizerSpec
    data: DataSpec
    """Paths are absolute."""
    kernels: KernelsSpec
    checkpoint: CheckpointSpec
    launch: LaunchSpec
    environment: tuple[Variable, ...] = ()
    """Of every rank, one entry per name, sorted; secrets are only named, in ``launch.secrets``."""
    prediction: Prediction
    alternatives: tuple[Alternative, ...] = ()
    candidates: tuple[CandidateRow, ...] = ()
    """Priced layouts, fastest first, with all of the front over time, memory and devices."""
    search: SearchSummary | None = None
    limit: str = ""
    """What holds the layout back: the constraint that binds, and the term that would have to shrink."""
    reasons: tuple[str, ...] = ()
    """Why this layout: one sentence each."""
    findings: tuple[Finding, ...] = ()
    runnable: bool
    not_runnable: tuple[str, ...] = ()
    """Rule codes that say what the runtime cannot run yet."""
    spec: dict[str, Any]
    """The spec as the user wrote it, overrides applied."""
    inputs: dict[str, str] = {}
    """SHA-256 of every input: spec, catalog, model configuration."""

    @property
    def contradiction(self) -> str:
        """What an edited plan says in two ways: the ranks, their groups, or the layers; empty: nothing."""
        mesh, layout = self.layout.mesh, self.layout
        ranks, there = self.layout.mesh.world_size, self.devices.nodes * self.devices.per_node
        if ranks != there:
            return f"layout.mesh is of {ranks} ranks, devices of {there}"
        groups = (
            ("tensor_inner", layout.tensor_inner, mesh.tp),
            ("sequence_inner", layout.sequence_inner, mesh.cp),
            ("sequence_teams", layout.sequence_teams**2, mesh.cp),
        )
        for name, size, among in groups:
            if among % size:
                return f"layout.{name} makes groups of {size} ranks among {among}"
        layers, named = self.model.layers, len(self.layout.recompute)
        if named != layers:
            return f"layout.recompute names {named} layers, the model has {layers}"
        ends = [0, *(stop for _, stop in self.layout.stages)]
        if [start for start, _ in self.layout.stages] != ends[:-1] or ends[-1] != layers or sorted(ends) != ends:
            return f"layout.stages are not the {layers} layers one after the other"
        return ""

    @property
    def shares(self) -> tuple[Spans, ...]:
        """Tokens of a sequence that each sequence-parallel rank holds."""
        layout, grid = self.layout, self.model.grid
        found = shares(
            self.training.sequence_length,
            layout.mesh.cp,
            layout.sequence_order,
            inner=layout.sequence_inner,
            columns=grid[1] if grid else 0,
        )
        if layout.sequence_method == "startrail" and layout.mesh.cp > 1:
            return Trails(layout.mesh.cp, layout.sequence_teams, layout.sequence_inside).dealt(found)
        return found

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on the rank that has most of them."""
        return self.layout.micro_batch * max(tokens_of(share) for share in self.shares)

    def to_json(self) -> str:
        """Return the plan as JSON with sorted keys, ending in a newline."""
        return json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan; raises ``pydantic.ValidationError`` where it is malformed or of another version."""
        return cls.model_validate_json(text)

    def deciding(self) -> dict[str, Any]:
        """Return, as data, everything that decides what runs; who decided it and why does not."""
        words: dict[str, Any] = {"partition": {"__all__": {"rule", "why"}}}
        return self.model_dump(mode="json", exclude=words | dict.fromkeys(NOT_RUN, True))

    @property
    def hash(self) -> str:
        """SHA-256 of everything that decides what runs; predictions, reasons and alternatives do not count."""
        return hashlib.sha256(json.dumps(self.deciding(), sort_keys=True).encode()).hexdigest()
