"""The ``training``, ``optimizer``, ``kernels`` and ``checkpoint`` sections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    WrapSerializer,
)

from partool.spec._base import OneOf, Section, shorthand
from partool.spec.averaging import EmaSpec
from partool.spec.distill import DistillSpec
from partool.spec.judging import BestSpec, EarlyStop
from partool.spec.numbers import (
    Coefficient,
    Epochs,
    Factor,
    FactorOrNone,
    Seed,
    Sequences,
    Share,
    Steps,
    StepsOrNone,
    Tokens,
    TrainedTokens,
)
from partool.spec.objective import ObjectiveSpec
from partool.spec.patterns import FilePath
from partool.strategies.kernel_parts import PARTS
from partool.strategies.optimizers import OPTIMIZERS

Precision = Literal["fp64", "fp32", "bf16", "fp16", "fp8"]


MOST_NEW_TOKENS = 64
"""Most tokens that a validation continues a prompt by: each takes a forward pass."""


class PromptMessage(Section):
    """A message of a prompt, which the chat template renders."""

    role: Annotated[str, Field(min_length=1)]
    """Who says it, such as ``system`` or ``user``."""
    content: str
    """What is said."""


Prompt = Annotated[str, Field(min_length=1)] | Annotated[list[PromptMessage], Field(min_length=1)]


class Validation(Section):
    """Loss on held-out data, and texts by the model."""

    every: StepsOrNone = 0
    """Steps between validations; 0 validates only at the end."""
    samples: Sequences = 64
    """Sequences per validation of each set, over all ranks."""
    prompts: Annotated[list[Prompt], Field(max_length=64)] = []
    """Texts, or lists of messages, that the model continues at each validation: always by the likeliest token."""
    new_tokens: Annotated[int, Field(ge=1, le=MOST_NEW_TOKENS)] = 32
    """Most tokens that a prompt is continued by; a token that ends a text or an answer ends it earlier. Each takes a
    forward pass over full sequences."""


class AdversarialSpec(Section):
    """Training on embeddings to which the perturbation is added that raises the loss most (docs/guide/adversarial.md).

    Our reading of ScaLA (Zhang et al.): a small random perturbation takes one step of projected gradient ascent before
    every micro-batch's passes.
    """

    epsilon: FactorOrNone = 0.0
    """Longest perturbation of one token's embedding, in ``norm``; 0 switches adversarial training off."""
    norm: Literal["l2", "linf"] = "l2"
    """Length of a perturbation: root of the sum of squares, or the largest absolute number."""
    step_size: Factor | None = None
    """Length of the ascent step, in ``norm``; default: ``epsilon``."""
    noise: Share = 0.1
    """Length of the random perturbation before the ascent, at most, as a share of ``epsilon``."""
    start_step: StepsOrNone = 0
    """Optimizer steps of plain training before the first perturbation."""

    def share(self, steps: int) -> float:
        """Return the share of ``steps`` optimizer steps in which embeddings are perturbed."""
        return max(0, steps - self.start_step) / steps if self.epsilon else 0.0


class TrainingSpec(Section):
    """Length, batch and precision of the training."""

    sequence_length: Tokens = 2048
    """Tokens per sequence."""
    global_batch: Sequences = 256
    """Sequences per optimizer step, over all ranks and micro-batches."""
    steps: Steps = 1000
    """Optimizer steps."""
    epochs: Epochs | None = None
    """Passes over the data, in place of ``steps``. Data that have to be tokenised first are counted by
    ``partool data prepare``."""
    tokens: TrainedTokens | None = None
    """Tokens of all sequences, in place of ``steps``; the last step may train on more."""
    precision: Precision = "bf16"
    """Type of parameters and activations in both passes; master weights and optimizer states are fp32 (fp64 with fp64).

    fp8: matrix products in 8 bits, everything else in bf16."""
    seed: Seed = 0
    """Seed of the initial weights, of the order of the data and of dropout."""
    z_loss: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Weight of the squared logarithm of the softmax's denominator, which is added to every token's loss and so keeps
    logits small (PaLM, arXiv 2204.02311, section 5: 1e-4). Reported losses, on held-out data too, include it."""
    multi_token_weight: Coefficient = 0.3
    """Weight λ of the mean loss of the modules of ``model.multi_token``, added to the loss that trains the model
    (DeepSeek-V3, arXiv 2412.19437, section 2.2: 0.3 for the first 10T tokens, then 0.1). Reported losses leave it
    out."""
    objective: Annotated[ObjectiveSpec, BeforeValidator(shorthand("kind"))] = ObjectiveSpec()
    distill: Annotated[DistillSpec | None, BeforeValidator(shorthand("teacher"))] = None
    adversarial: AdversarialSpec = AdversarialSpec()
    deterministic: bool = False
    """Use only algorithms with bitwise equal results every time; slower on accelerators."""
    validation: Validation = Validation()
    ema: Annotated[EmaSpec | None, BeforeValidator(shorthand("decay", float, int))] = None
    early_stop: Annotated[EarlyStop | None, BeforeValidator(shorthand("patience", int))] = None
    """Ends the run before ``steps`` where validations do not improve any more; a number is the patience."""
    log_every: Steps = 10
    """Steps between two lines of the log."""
    max_nonfinite_steps: Steps = 10
    """Consecutive steps with a non-finite gradient that are skipped before the run stops."""

    @property
    def sees_positions(self) -> bool:
        """Whether single positions are looked at: those of pairs of answers, or of prompts that are continued."""
        return self.objective.prefers or bool(self.validation.prompts)

    @property
    def counts_later(self) -> bool:
        """Whether ``steps`` is not what the spec gives, but follows from ``epochs`` or ``tokens``."""
        return self.epochs is not None or self.tokens is not None


class LrSchedule(Section):
    """Learning rate over the steps, as a factor of ``optimizer.lr``."""

    kind: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    """Form of the schedule after the warm-up; wsd: warm-up, stable, decay."""
    warmup_steps: StepsOrNone = 0
    """Steps of linear warm-up."""
    warmup_ratio: Share | None = None
    """Linear warm-up as a share of the steps, in place of ``warmup_steps``."""
    min_ratio: Share = 0.1
    """Final learning rate as a share of the peak."""
    decay_steps: Steps | None = None
    """wsd (warm-up, stable, decay): length of the final decay; default one fifth of the steps."""


OptimizerName = Annotated[str, OneOf(OPTIMIZERS)]
Betas = Annotated[list[Share], Field(min_length=2, max_length=2)]
Momentum = Annotated[float, Field(ge=0.0, lt=1.0)]
NewtonSchulz = Literal["bf16", "working"]
Adapt = Literal["matrices", "all"]

NormBounds = Annotated[list[FactorOrNone], Field(min_length=2, max_length=2)]


class OptimizerGroup(Section):
    """Settings of the parameters that a pattern matches; default: the settings of the ``optimizer`` section."""

    lr_factor: FactorOrNone = 1.0
    """Learning rate as a factor of ``optimizer.lr`` and its schedule."""
    weight_decay: FactorOrNone | None = None
    """Weight decay of all matching parameters, norms and biases too."""
    betas: Betas | None = None
    """Betas, as in ``optimizer.betas``."""
    eps: Factor | None = None
    """Term of the denominator, as in ``optimizer.eps``."""
    momentum: Momentum | None = None
    """Momentum, as in ``optimizer.momentum``."""


class OneBit(Section):
    """When ranks average gradients in full precision, moves with one bit per element, and nothing.

    DeepSpeed's names: var_update_scaler, var_freeze_step, local_step_scaler and local_step_clipper.
    """

    variance_doubling: StepsOrNone = 16
    """Updates of the variance after which the number of steps between two updates doubles; 0: an update in every step
    before ``freeze_step``."""
    freeze_step: Steps | None = None
    """First step, counted from 0, with a constant variance; default: the warm-up or 15 % of the steps, whichever is
    longer."""
    local_doubling: Steps | None = None
    """Steps after ``freeze_step`` after which the number of steps between two exchanges doubles; default: a tenth of
    the steps."""
    local_most: Steps = 16
    """Largest number of steps between two exchanges; 1: ranks exchange in every step, as in 1-bit Adam."""


def _from_pairs(value: Any) -> Any:
    """Return [[pattern, settings], ...] as a mapping from pattern to settings; other values are unchanged."""
    if isinstance(value, (list, tuple)) and all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in value):
        return dict(value)
    return value


def _to_pairs(value: Any, dump: Callable[[Any], dict[str, Any]]) -> list[tuple[str, Any]]:
    """Return a mapping as a list of pairs, because plans sort the keys of mappings and the order of patterns counts."""
    return list(dump(value).items())


Groups = Annotated[
    dict[Annotated[str, Field(min_length=1)], OptimizerGroup],
    BeforeValidator(_from_pairs),
    WrapSerializer(_to_pairs),
]


class OptimizerSpec(Section):
    """The optimizer and its settings; docs/guide/optimizers.md has the formulas."""

    name: OptimizerName = "adamw"
    """adamw: Loshchilov and Hutter, arXiv 1711.05101; lion: Chen et al., arXiv 2302.06675; adagrad: Duchi et al., JMLR
    12 (2011); sgd: with momentum; muon: Jordan et al., scaled as in Liu et al., arXiv 2502.16982, for matrices of
    layers, and adamw for all other parameters; zero_one_adam: Lu et al., arXiv 2202.06009, which exchanges one bit per
    parameter or nothing in most steps; zero_one_lamb: the same with lamb's scaling, as in 1-bit LAMB (Li et al., arXiv
    2104.06069); lamb: You et al., arXiv 1904.00962. Weight decay is decoupled from the gradient
    in all of them, and a part of the step that lamb scales."""
    lr: Factor = 3e-4
    """Peak learning rate."""
    betas: Betas = [0.9, 0.95]
    """adamw, also that of muon, zero_one_adam and lamb: decay rates of the two moments; lion: weight of the momentum in
    a step, and decay rate of the momentum."""
    momentum: Momentum = 0.9
    """Share of the last step's direction that sgd keeps, and decay rate of muon's momentum; 0 keeps nothing."""
    newton_schulz: NewtonSchulz = "bf16"
    """Type in which muon orthogonalises matrices; working: the type of the master weights."""
    eps: Factor = 1e-8
    """Term that adamw, also that of muon, zero_one_adam, lamb and adagrad add to the denominator."""
    one_bit: OneBit = OneBit()
    """Exchanges of zero_one_adam and zero_one_lamb."""
    adapt: Adapt = "matrices"
    """Parameters whose steps lamb scales by the ratio of norms; those of norms and biases only with ``all``."""
    norm_bounds: NormBounds | None = None
    """Lowest and highest norm of weights that lamb scales steps by; default: the norm as it is."""
    weight_decay: FactorOrNone = 0.1
    """Weight decay of matrices; norms and biases have none."""
    groups: Groups = {}
    """Settings by glob pattern of parameters, such as ``embed.*``; the first that matches a parameter counts."""
    clip: FactorOrNone = 1.0
    """Largest global gradient norm; 0 switches clipping off. zero_one_adam clips each rank's own gradients, except in
    steps whose gradients are averaged in full precision."""
    schedule: LrSchedule = LrSchedule()


Fused = Annotated[str, OneOf(PARTS)]


def _once(parts: list[Fused]) -> list[Fused]:
    """Return the parts without duplicates, in their order."""
    return list(dict.fromkeys(parts))


class KernelsSpec(Section):
    """Implementation and configurations of partool's own kernels."""

    mode: Literal["auto", "native", "torch"] = "auto"
    """native: compiled kernels, or an error if they are missing; torch: the reference; auto: native if available."""
    fused: Annotated[list[Fused], AfterValidator(_once)] | Literal["auto"] = "auto"
    """Parts of the model that are computed by one fused kernel each instead of several kernels of torch."""
    tuned: list[FilePath] = Field(default_factory=list)
    """Folders or files with your own configurations, tried before partool's: tables of partool, aiter or vLLM."""
    require: Literal["heuristic", "modelled", "device", "shape", "rows", "exact"] = "heuristic"
    """Least certain source allowed for the configuration of a matrix product: a rule, an entry that was not measured,
    or an entry measured on another device, for similar widths, for other rows, or for exactly this shape."""


class ResumeSpec(Section):
    """How a run goes on from its checkpoints."""

    fallback: Literal["auto"] | bool = "auto"
    """Whether a run whose newest checkpoint is damaged goes on from the newest intact one, and sets the damaged ones
    aside. auto: only where nobody is at hand, in restarts by the agent, after requeues, and on Kubernetes."""


class CheckpointSpec(Section):
    """Frequency, number and place of checkpoints."""

    every: StepsOrNone | str = "auto"
    """Steps between checkpoints, or a duration such as ``30min``; 0 saves only at the end and on a stop signal;
    ``auto``: 30min if the run is predicted to last more than an hour, else 0."""
    keep: Steps = 3
    """Checkpoints kept; older checkpoints are deleted once a newer one is complete. With 1, the previous checkpoint
    stays until a step has computed with the newest."""
    best: Annotated[BestSpec | None, BeforeValidator(shorthand("metric"))] = None
    """Checkpoints of the best validations are kept, too, and a validation that is one of the best is followed by a
    checkpoint; a bare word is the metric."""
    dir: FilePath | None = None
    """Folder of checkpoints; default: the run's folder."""
    mode: Literal["auto", "async", "sync"] = "auto"
    """async: training goes on while the files are written, from copies in host memory; sync: it waits, and blocks are
    copied one by one; auto: async where host memory holds the copies."""
