"""The matrices that an optimizer treats as wholes: those that Muon orthogonalises, and those whose norms LAMB reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from partool.layout.parameters import ParameterInfo, is_frozen, parameters
from partool.spec.model import ModelConfig
from partool.spec.training import Adapt

_KINDS = ("attention", "ffn", "expert")
NEWTON_SCHULZ_STEPS = 5
"""Steps of the quintic Newton–Schulz iteration (Jordan et al., kellerjordan.github.io/posts/muon)."""


@dataclass(frozen=True, slots=True)
class MatrixStack:
    """A parameter of one matrix, or of several matrices of equal shape stacked row under row."""

    name: str
    count: int
    """Number of matrices: 1, or the number of experts."""
    rows: int
    """Rows of one matrix."""
    columns: int

    @property
    def elements(self) -> int:
        """Number of elements of all matrices."""
        return self.count * self.rows * self.columns


def takes_whole_matrices(info: ParameterInfo) -> bool:
    """Return True if Muon orthogonalises a parameter: matrices of attention and of feed-forward networks, also experts.

    Embeddings, positions, heads, routers, norms and biases are for AdamW (Liu et al., arXiv 2502.16982, section 2.2).
    """
    return info.kind in _KINDS and len(info.shape) == 2


def stack_of(model: ModelConfig, info: ParameterInfo) -> MatrixStack:
    """Return the matrices of a parameter; experts are stacked row under row."""
    rows, columns = info.shape
    count = _count(model, info)
    return MatrixStack(info.name, count, rows // count, columns)


def _count(model: ModelConfig, info: ParameterInfo) -> int:
    if info.kind != "expert" or info.layer is None:
        return 1
    moe = model.of_layer(info.layer).moe
    return 1 if moe is None else moe.experts


def matrix_stacks(model: ModelConfig, frozen: Iterable[str] = ()) -> list[MatrixStack]:
    """Return the trained parameters that Muon orthogonalises, in the order of the model."""
    frozen = tuple(frozen)
    infos = (info for info in parameters(model) if takes_whole_matrices(info) and not is_frozen(info.name, frozen))
    return [stack_of(model, info) for info in infos]


def is_scaled(adapt: Adapt, dimensions: int) -> bool:
    """Return True if LAMB scales the steps of a parameter with this number of dimensions by norms."""
    return adapt == "all" or dimensions >= 2


def scaled_matrices(model: ModelConfig, adapt: Adapt, frozen: Iterable[str] = ()) -> dict[str, int]:
    """Return the trained parameters whose steps LAMB scales by norms, each with the number of its matrices.

    Each expert has matrices of its own; any other parameter is one matrix, as the model names it.
    """
    frozen = tuple(frozen)
    infos = [info for info in parameters(model) if not is_frozen(info.name, frozen)]
    return {info.name: _count(model, info) for info in infos if is_scaled(adapt, len(info.shape))}


def newton_schulz_flops(rows: int, columns: int) -> float:
    """Return the FLOPs to orthogonalise one matrix by :data:`NEWTON_SCHULZ_STEPS` steps.

    A step for m ≤ n multiplies X Xᵀ (2 m²n), the square of the result (2 m³), and that with X (2 m²n); the post of
    Jordan et al. counts the same products.
    """
    m, n = sorted((rows, columns))
    return NEWTON_SCHULZ_STEPS * (4.0 * m * m * n + 2.0 * m**3)
