"""The ``adapter`` section: small matrices that are trained beside frozen ones (LoRA, Hu et al., arXiv 2106.09685).

DoRA (Liu et al., arXiv 2402.09353) trains the norm of each row of the sum apart from its direction.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from partool.spec._base import Section
from partool.spec.numbers import Factor, Width
from partool.spec.patterns import FilePath

Pattern = Annotated[str, Field(min_length=1)]


def _as_tuple(value: Any) -> Any:
    """Return a list as a tuple, which a model's description needs to be hashable."""
    return tuple(value) if isinstance(value, list) else value


Targets = Annotated[Literal["all-linear"] | tuple[Pattern, ...], BeforeValidator(_as_tuple)]
Base = Literal["bf16", "int8", "nf4"]
Dropout = Annotated[float, Field(ge=0.0, lt=1.0)]


class LowRank(Section):
    """What an adapter adds to a model: to the product with a matrix W of x, ``scale · B (A x)``.

    DoRA gives row i of V = W + scale · B A the norm mᵢ: the product is m ⊙ (V x) / ‖V‖, with the norms of V's rows.
    """

    kind: Literal["lora", "dora", "auto"] = "lora"
    """lora: Hu et al., arXiv 2106.09685; dora: with a trained norm of each row, Liu et al., arXiv 2402.09353.
    auto, in a spec only: the first of these that fits the machines: all weights trained, lora beside a base in bf16, in
    int8, in nf4."""
    rank: Width = 16
    """Rows of A and columns of B."""
    alpha: Factor = 32.0
    """Numerator of the scale of B A."""
    rslora: bool = False
    """Denominator of the scale: false is the rank, true its square root (Kalajdzievski, arXiv 2312.03732)."""
    dropout: Dropout = 0.0
    """Share of an adapter's input elements that are set to zero in each forward pass of the training."""
    targets: Targets = "all-linear"
    """Matrices that get an adapter: all projections of the layers, or glob patterns of their names, such as
    ``layers.*.attention.q``, or last parts of their names, such as ``q`` (``q_proj`` means the same)."""
    base: Base = "bf16"
    """Type in which the frozen matrices of the layers are stored: that of computation (``bf16``), 8 bits and a scale
    per row (Dettmers et al., arXiv 2208.07339), or 4 bits and a scale per 64 elements (QLoRA, arXiv 2305.14314)."""
    double_quant: bool = True
    """With ``nf4``, whether the scales are stored in 8 bits, too."""

    @property
    def scale(self) -> float:
        """Return the factor of B A."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class AdapterSpec(LowRank):
    """Trains small matrices beside the model's, which are frozen; docs/guide/adapters.md says more."""

    train: list[Pattern] = []
    """Parameters that are trained in full beside the adapter: ``embed``, ``head``, ``norms``, or glob patterns of
    names."""
    lr_ratio: Factor = 1.0
    """Learning rate of B divided by that of A, which is ``optimizer.lr`` (LoRA+, Hayou et al., arXiv 2402.12354)."""
    weights: FilePath | None = None
    """Folder of an adapter that PEFT or ``partool export`` wrote, to start from; default: A is drawn, B is zero."""

    @property
    def form(self) -> LowRank:
        """Return what the adapter adds to the model, without how it is trained."""
        return LowRank.model_validate({name: getattr(self, name) for name in LowRank.model_fields})
