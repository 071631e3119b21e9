"""A spec with its model and machines resolved, and values for fields that the spec leaves ``auto``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Literal

import numpy as np

from partool.catalog.profile import Applied
from partool.cost.case import EAGER, SCHEDULES, Column, Mask
from partool.cost.kinds import Kind, kinds
from partool.cost.training.gathers import controls_of
from partool.cost.training.micro import layer_elements
from partool.layout.adapters import B, frozen_beside
from partool.layout.parameters import count, is_frozen, parameters, priced_frozen
from partool.layout.tensor.adapters import shapes as adapted_shapes
from partool.layout.tensor.adapters import short_names
from partool.plan.schedule import splits_backward
from partool.planner.described import Description
from partool.planner.evidence import asked_for, taken_for_granted
from partool.schedule import Schedule, to_text
from partool.spec.hardware import Devices
from partool.spec.model import ModelConfig
from partool.spec.parallel import Compile, Offload
from partool.spec.spec import Spec
from partool.spec.training import OptimizerGroup, OptimizerSpec
from partool.spec.watched import note_read
from partool.strategies.engines import ENGINES, EngineRecord
from partool.strategies.jobs import JOBS, JobRecord
from partool.strategies.optimizers import OPTIMIZERS
from partool.work.blocks import divided_model
from partool.work.gathers import Controls
from partool.work.traced import Trace, shipped
from partool.work.training import TrainingWork

LEAST_TOKENS = 1024
"""Minimum number of tokens of a tile: matrix products with fewer rows do not keep a device busy."""
LOGITS = 2**24
"""Number of logits of a tile, a quarter of the logits that the runtime holds at once by default."""


def network_tile(model: ModelConfig, length: int) -> int:
    """Return the tokens per tile of feed-forward networks, for sequences of ``length`` tokens; 0 means no tiles.

    A tile has as many tokens as the hidden size, as in ALST (arXiv 2506.13996, section 3.1), and at least
    ``LEAST_TOKENS``: the inner tensors of a tile are then about as large as the weights.
    """
    tokens = max(LEAST_TOKENS, model.hidden)
    return tokens if length >= 2 * tokens else 0


def loss_tile(model: ModelConfig, length: int) -> int:
    """Return the number of tokens whose logits exist at once, for sequences of ``length`` tokens.

    0 means the runtime's default.
    """
    tokens = max(64, LOGITS // model.vocab)
    return tokens if length >= 2 * tokens else 0


Relaxation = Literal["gathers", "tiles", "disks", "pinned"]
"""Name of a constraint that is relaxed if memory is too small.

gathers: settings of all-gathers that are ``auto`` are chosen for least memory; tiles: sequences are processed in tiles
where the spec leaves the tiles ``auto``; disks: the optimizer's state goes to the disks that the spec names, if its
offload is ``auto``; pinned: layouts may pin more host memory than the spec allows, so that a finding can say how much
is needed.
"""


class Stopped(Exception):  # noqa: N818 - an answer to the user's request, not an error
    """A search was stopped (:meth:`SearchBudget.stop`) before it found a layout that it would take."""


@dataclass
class SearchBudget:
    """What searches have used, and their limit, in rows: one layout priced with the closed equations (about 10 µs)."""

    rows: int = 0
    """Number of rows so far."""
    limit_rows: float = float("inf")
    """Number of rows after which searches end with their best result so far."""
    subject: str = ""
    """What is searched now, for people who wait."""
    best_s: float = float("inf")
    """Step time of the best layout of the latest search, in seconds."""
    has_best: bool = False
    """True once a search has found a layout that it would take."""
    has_fitting: bool = False
    """True once a search knows layouts that fit by the closed equations."""
    stopped: bool = False
    """True if the user has asked for the best result so far."""
    reached_limit: bool = False
    """True if a search has ended at its limit of rows."""

    def stop(self) -> None:
        """End searches with their best result so far."""
        self.stopped, self.limit_rows = True, 0.0


@dataclass(frozen=True)
class Problem:
    """A spec with its model and machines resolved."""

    spec: Spec
    model: ModelConfig
    devices: Devices
    measured: Applied | None = None
    """The calibration of these machines; the figures in ``devices`` are already calibrated."""
    lists: Schedule | None = None
    """The schedule in the file that the spec names."""
    description: Description | None = None
    """The runtime's description of a model that transformers builds; rules read it as ``described``."""
    teacher: ModelConfig | None = None
    """The model of ``training.distill``'s teacher; None without one."""
    trace: Trace = field(default_factory=shipped)
    """Bytes that the model's blocks save: the data that come with partool, or those of ``plan --trace``."""
    relaxed: frozenset[Relaxation] = frozenset()
    """Constraints that were relaxed to find a layout that fits."""
    budget: SearchBudget = field(default_factory=SearchBudget, compare=False, repr=False)
    """Counter of priced rows, shared with all problems derived from this one; its value is equal on all machines."""
    jobs: dict[Compile, TrainingWork] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Results of :func:`partool.planner.cost_job.cost_job`, cached by the setting of ``compile``."""

    @property
    def described(self) -> Description | None:
        """The runtime's description of a model that transformers builds; None for partool's own decoder."""
        note_read(("model",))
        return self.description

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.devices.nodes * self.devices.per_node

    @property
    def engine(self) -> EngineRecord:
        """The training system that the plan is for."""
        return ENGINES[self.spec.engine]

    @property
    def job(self) -> JobRecord:
        """The kind of job that the plan is for."""
        return JOBS[self.spec.job]

    def why_fixed(self, path: str) -> str:
        """Return why the field of ``parallel`` at ``path`` is not open, as the end of a sentence."""
        return f"job: {self.job.name} has no other" if path in self.job.settled else "the spec asks for it"

    @property
    def one_bit(self) -> bool:
        """Whether the optimizer exchanges one bit per parameter, which needs whole copies of the training state."""
        return bool(OPTIMIZERS[self.spec.optimizer.name].whole_steps)

    @cached_property
    def granted(self) -> frozenset[str]:
        """Mechanisms that do not count for a layout's tier of evidence."""
        return taken_for_granted(self.spec)

    @cached_property
    def asked(self) -> frozenset[str]:
        """Mechanisms that the spec asks for, whose errors do not count against a layout."""
        return asked_for(self.spec)

    @cached_property
    def controls(self) -> Controls:
        """Settings of the all-gathers of sharded parameters."""
        return controls_of(self.spec.parallel.data, self.model, pressed="gathers" in self.relaxed)

    @cached_property
    def tiles_problem(self) -> str:
        """Reason why feed-forward networks cannot process a sequence in tiles; empty if they can."""
        if self.model.moe is not None:
            return "experts are given tokens by their router"
        return self.described.tiles_problem if self.described is not None else ""

    @cached_property
    def mlp_tile(self) -> int:
        """Number of tokens of a sequence that a feed-forward network processes at once; 0 means all tokens."""
        pinned, length = self.spec.parallel.tiles.mlp, self.spec.training.sequence_length
        if pinned != "auto":
            return pinned if pinned < length else 0
        excluded = self.spec.parallel.compile == "block" or self.spec.parallel.tensor.sequence_norms is True
        return (
            network_tile(self.model, length)
            if "tiles" in self.relaxed and not excluded and not self.tiles_problem
            else 0
        )

    @cached_property
    def loss_tile(self) -> int:
        """Number of tokens whose logits exist at once; 0 means the runtime's default."""
        pinned, length = self.spec.parallel.tiles.loss, self.spec.training.sequence_length
        if pinned != "auto":
            return pinned
        return loss_tile(self.model, length) if "tiles" in self.relaxed else 0

    @cached_property
    def lists_text(self) -> str:
        """The schedule of the file that the spec names, in the text form that plans hold; empty without a file."""
        return to_text(self.lists) if self.lists is not None else ""

    @property
    def stage_layers(self) -> tuple[int, ...] | None:
        """Number of layers of each stage; None if the spec does not set the numbers."""
        layers = self.spec.parallel.pipeline.layers
        return None if layers == "auto" else tuple(layers)

    @cached_property
    def layer_kinds(self) -> tuple[Kind, ...]:
        """Kind of each layer of the model."""
        return kinds(divided_model(self.model))

    @property
    def tensor_degree(self) -> int | Literal["auto"]:
        """Number of tensor ranks that the spec sets as a degree or as a shape."""
        tensor = self.spec.parallel.tensor
        if tensor.degree == "auto" and tensor.shape != "auto":
            return prod(tensor.shape)
        return tensor.degree

    @property
    def pinned_degrees(self) -> dict[str, int]:
        """Model-parallel degrees that the spec sets, by the name of the field."""
        parallel = self.spec.parallel
        values = {
            "tensor": self.tensor_degree,
            "pipeline.stages": self.lists.ranks if self.lists is not None else parallel.pipeline.stages,
            "sequence.degree": parallel.sequence.degree,
        }
        return {name: value for name, value in values.items() if value != "auto"}

    @property
    def domain(self) -> int:
        """Number of ranks that the fast link (such as NVLink) connects with each other."""
        return self.devices.joined

    @cached_property
    def offload(self) -> Offload:
        """The spec's offload section; with ``disks`` relaxed, an ``auto`` optimizer state goes to files."""
        asked = self.spec.parallel.offload
        to_files = asked.optimizer == "auto" and "disks" in self.relaxed
        return asked.model_copy(update={"optimizer": "nvme"}) if to_files else asked

    @cached_property
    def parameters(self) -> int:
        """Number of the model's parameters."""
        return count(parameters(self.model))

    @cached_property
    def frozen(self) -> tuple[str, ...]:
        """Patterns of the names of parameters that are not trained: those of the spec, and all beside an adapter."""
        adapter, given = self.spec.adapter, tuple(self.spec.model.frozen)
        if adapter is None:
            return given
        if self.described is None:
            return (*given, *frozen_beside([info.name for info in parameters(self.model)], adapter.train))
        structure = self.described.structure
        names = list(adapted_shapes(structure, adapter.form))
        return (*given, *frozen_beside(names, adapter.train, short_names(structure)))

    @cached_property
    def priced_frozen(self) -> tuple[str, ...]:
        """Patterns of the parameters that are not trained in the model that predictions are of."""
        return priced_frozen(self.model, self.frozen, self.spec.adapter, partools=self.described is None)

    @cached_property
    def optimizer(self) -> OptimizerSpec:
        """The spec's optimizer, with a group for an adapter's B where its learning rate differs from that of A."""
        optimizer, adapter = self.spec.optimizer, self.spec.adapter
        if adapter is None or adapter.lr_ratio == 1.0:
            return optimizer
        groups = optimizer.groups | {f"*.{B}": OptimizerGroup(lr_factor=adapter.lr_ratio)}
        return optimizer.model_copy(update={"groups": groups})

    @cached_property
    def trained(self) -> int:
        """Number of the model's parameters that are not frozen."""
        return count(info for info in parameters(self.model) if not is_frozen(info.name, self.priced_frozen))

    @property
    def host_link(self) -> bool:
        """True if devices have memory of their own, with a link to host memory of known bandwidth."""
        return self.devices.backend != "cpu" and self.devices.host_link_bytes_per_s is not None

    @property
    def compile(self) -> Compile:
        """``block`` if blocks are compiled where the schedule allows compilation, else ``none``.

        The spec decides; for ``auto``, blocks are compiled on accelerators unless a setting excludes it: ``leaves``, as
        their modules are gathered inside blocks; overlap or chunks of tensor parallelism, as the compiler orders
        collectives itself; or tiles of feed-forward networks, as the compiler merges tiles.
        """
        pinned = self.spec.parallel.compile
        if pinned != "auto":
            return pinned
        leaves, tensor = self.spec.parallel.data.leaves, self.spec.parallel.tensor
        apart = (
            bool(self.mlp_tile)
            or (leaves != "auto" and leaves)
            or tensor.overlap not in ("auto", "none")
            or tensor.chunks not in ("auto", 1)
        )
        return "none" if self.devices.backend == "cpu" or apart else "block"

    @property
    def compiles_later(self) -> bool:
        """True if ``compile`` is ``auto`` and blocks are compiled.

        Layouts with schedules that exclude compilation are then tried uncompiled.
        """
        return self.spec.parallel.compile == "auto" and self.compile == "block"

    def excludes_compile(self, schedule: Column) -> Mask:
        """Return a mask that is True where an index in ``schedule`` stands for a schedule without compiled blocks.

        Indices are those of ``cost.case.SCHEDULES``.
        """
        splits = self.lists is not None and splits_backward(self.lists)
        return np.isin(schedule, (*EAGER, SCHEDULES.index("file")) if splits else EAGER)

    @cached_property
    def layer_elements(self) -> int:
        """Number of parameters in the model's smallest layer, all experts included."""
        return min(sum(layer_elements(self.model, kind)) for kind in set(kinds(self.model)))

    @property
    def capacity_bytes(self) -> int:
        """Bytes of a device's memory that a layout may use: all memory minus the headroom."""
        return int(self.devices.memory_bytes * (1.0 - self.spec.limits.memory_headroom))

    def relax(self, *names: Relaxation) -> Problem:
        """Return the problem with the constraints ``names`` relaxed in addition to earlier ones."""
        return replace(self, relaxed=self.relaxed.union(names))

    def on(self, **figures: object) -> Problem:
        """Return a copy of the problem in which ``figures`` replace fields of ``devices``."""
        return replace(self, devices=self.devices.model_copy(update=figures))

    def with_parallel(self, **changes: object) -> Problem:
        """Return a copy of the problem in which ``changes`` replace fields of the spec's ``parallel`` section."""
        parallel = self.spec.parallel.model_copy(update=changes)
        return replace(self, spec=self.spec.model_copy(update={"parallel": parallel}))

    def with_layers(self, layers: int) -> Problem:
        """Return a copy of the problem with ``layers`` layers, which repeat the model's sequence of attention kinds."""
        kinds = self.model.layer_types
        repeated = tuple(kinds[layer % len(kinds)] for layer in range(layers)) if kinds else ()
        return replace(self, model=self.model.model_copy(update={"layers": layers, "layer_types": repeated}))

    def with_training(self, **changes: object) -> Problem:
        """Return a copy of the problem in which ``changes`` replace fields of the spec's ``training`` section."""
        training = self.spec.training.model_copy(update=changes)
        return replace(self, spec=self.spec.model_copy(update={"training": training}))


def divisors(number: int) -> list[int]:
    """Return all divisors of ``number`` in ascending order, in O(sqrt(number)) time."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def nearest(wanted: int, legal: list[int], count: int = 2) -> str:
    """Return text with the ``count`` legal values nearest to ``wanted``, such as ``4 or 8`` or ``1, 2 or 4``."""
    chosen = [str(n) for n in sorted(sorted(legal, key=lambda n: (abs(n - wanted), n))[:count])]
    return " or ".join([", ".join(chosen[:-1]), chosen[-1]] if len(chosen) > 1 else chosen)
