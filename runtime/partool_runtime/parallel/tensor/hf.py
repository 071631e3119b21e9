"""Tensor parallelism of models that transformers builds; modules are kept, and parameters become a rank's parts.

The plan defines the partition of every parameter. Matrices, embeddings and experts get forward passes with exchanges;
attention modules get the rank's numbers of heads. No other code of a model depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from partool.layout.tensor import Partition, by_name
from partool.plan.types import Plan
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.experts import plain_where_odd
from partool_runtime.hf.model import HfPart
from partool_runtime.hf.patches import Patch, patch_forward
from partool_runtime.mesh import Ranks
from partool_runtime.model.adapter import Adapted
from partool_runtime.model.projection import Foreign, Projection
from partool_runtime.parallel.tensor.adapters import share_adapters
from partool_runtime.parallel.tensor.apply import first_row, make_team, place
from partool_runtime.parallel.tensor.columns import columns
from partool_runtime.parallel.tensor.hf_heads import Widths, is_attention, tell_heads
from partool_runtime.parallel.tensor.hf_random import Random
from partool_runtime.parallel.tensor.ops import Team, copy_to_tp, gather_from_tp, reduce_from_tp
from partool_runtime.parallel.tensor.rows import row
from partool_runtime.parallel.tensor.vocabulary import vocabulary_loss
from partool_runtime.placement import Placement

_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("query", "key", "value"),
    ("gate", "up"),
    ("w1", "w3"),
)
"""Names of sibling matrices with the same input, whose parts of the input's gradient are summed in one all-reduce."""


def apply_to_transformers(model: HfPart, plan: Plan, ranks: Ranks) -> None:
    """Cut the model to this rank's share, in place, while it is on the meta device. With one rank nothing changes.

    Raises ConfigurationError PT645 where the plan's partition does not fit this model's parameters.
    """
    if ranks.tp.size == 1:
        return
    _check(model, plan)
    place(model, plan, ranks)
    share_adapters(model, plan, make_team(plan, ranks))
    _Hooks(model, make_team(plan, ranks), by_name(plan.partition, model.shapes)).put()


def _check(model: HfPart, plan: Plan) -> None:
    rows = by_name(plan.partition, model.shapes)
    wrong = [name for name, shape in model.shapes.items() if name not in rows or rows[name].shape != shape]
    if wrong:
        message = f"the plan's partition does not fit the model: {', '.join(wrong[:5])}"
        raise ConfigurationError("PT645", message, "Plan it again with the transformers that is installed here.")


class _Cut(NamedTuple):
    """A module with a matrix, and the row of the plan's partition that describes the matrix."""

    name: str
    module: nn.Module
    row: Partition


class _Hooks:
    """Installs exchanges in a model's modules."""

    def __init__(self, model: HfPart, team: Team, rows: dict[str, Partition]) -> None:
        self._model, self._team, self._rows = model, team, rows
        self._originals = dict(model.aliases)
        self._random = Random(team.rank) if model.draws else None

    def put(self) -> None:
        """Replace forward passes, and set the numbers of heads of attention modules."""
        cuts = {cut.name: cut for cut in self._cuts()}
        for parent, module in self._model.named_modules():
            prefix = f"{parent}." if parent else ""
            children = {
                child: cuts[prefix + child]
                for child, inner in module.named_children()
                if prefix + child in cuts and (isinstance(inner, nn.Linear) or _transposed(inner))
            }
            self._columns(children)
            self._heads(prefix, module, children)
        styles = _styles(cuts.values())
        for cut in cuts.values():
            self._put(cut, styles)
        head = self._model.head_module
        if head is not None and self._rows[self._original(f"{self._model.head_name}.weight")].style == "vocabulary":
            first = first_row(self._model.placements, self._original(f"{self._model.head_name}.weight"))
            self._model.loss = HeadVocabularyLoss(self._team, first)

    def _original(self, name: str) -> str:
        return self._originals.get(name, name)

    def _placement(self, cut: _Cut) -> Placement:
        return self._model.placements[self._original(f"{cut.name}.weight")]

    def _cuts(self) -> Iterator[_Cut]:
        for name, module in self._model.named_modules():
            for leaf in module._parameters:
                row_ = self._rows.get(self._original(f"{name}.{leaf}"))
                if row_ is not None and leaf == "weight" and name != self._model.head_name:
                    yield _Cut(name, module, row_)

    def _put(self, cut: _Cut, styles: Mapping[str, set[str]]) -> None:
        module, style = cut.module, cut.row.style
        if isinstance(module, nn.Embedding) and style == "vocabulary":
            first = first_row(self._model.placements, self._original(f"{cut.name}.weight"))
            patch_forward(module, Patch.TENSOR, partial(_embed, module, first, self._team))
        elif style == "row":
            dim = 0 if _transposed(module) else 1
            spans = self._placement(cut).spans[dim]
            spans_to_cut = None if _gets_parts(cut.name, styles) else spans
            patch_forward(module, Patch.TENSOR, partial(self._row, _matrix(module), spans_to_cut))
        elif cut.row.summed_outputs:
            patch_forward(
                module, Patch.TENSOR, partial(_summed_outputs, module.forward, cut.row.summed_outputs, self._team)
            )

    def _columns(self, children: dict[str, _Cut]) -> None:
        """Install the exchanges of matrices cut by outputs; siblings with the same input share one exchange."""
        left_over = {name for name, cut in children.items() if cut.row.style in ("column", "column_gathered")}
        for names in (*_TOGETHER, *((name,) for name in children)):
            group = [name for name in names if name in left_over]
            left_over -= set(group)
            if group:
                self._group([children[name] for name in group])

    def _group(self, cuts: Sequence[_Cut]) -> None:
        together = _Together([_matrix(cut.module) for cut in cuts], self._team, self._random)
        for number, cut in enumerate(cuts):
            forward = partial(together.product, number)
            if cut.row.style == "column_gathered":
                dim = 1 if _transposed(cut.module) else 0
                widths = tuple(cut.row.local_shape(rank)[dim] for rank in range(self._team.ranks))
                forward = partial(_gathering, forward, widths, self._team, self._random)
            patch_forward(cut.module, Patch.TENSOR, forward)

    def _row(self, matrix: Projection, spans: Sequence[tuple[int, int]] | None, x: torch.Tensor) -> torch.Tensor:
        """Multiply by this rank's columns of a matrix; with ``spans``, ``x`` is whole and is first cut to ``spans``."""
        if spans is not None:
            full_x = copy_to_tp(x, self._team)
            parts = [full_x[..., start:stop] for start, stop in spans]
            x = torch.cat(parts, dim=-1) if parts else full_x[..., :0]
        out = row(x if x.dim() == 3 else x.reshape(1, -1, x.shape[-1]), matrix, self._team)
        if self._random is not None:
            self._random.leave()
        return out if x.dim() == 3 else out.reshape(*x.shape[:-1], out.shape[-1])

    def _heads(self, prefix: str, module: nn.Module, children: dict[str, _Cut]) -> None:
        """If a module is attention, set the rank's numbers of heads; if it holds the matrices of experts, wrap it."""
        stacked = [
            f"{prefix}{leaf}"
            for leaf, parameter in module._parameters.items()
            if parameter is not None and parameter.dim() == 3
        ]
        if any(self._rows[self._original(name)].cuts for name in stacked):
            patch_forward(module, Patch.TENSOR, partial(_experts, module.forward, self._team))
            plain_where_odd(module, [self._model.placements[self._original(name)].local_shape for name in stacked])
            return
        rows = [cut for cut in children.values() if cut.row.style == "row"]
        if len(rows) == 1 and is_attention(module):
            first = {name: self._widths(cut, 0) for name, cut in children.items() if cut.row.style == "column"}
            # Where queries, keys and values are all-gathered or not cut at all, every rank computes all heads.
            if first:
                tell_heads(module, self._widths(rows[0], 1), first)

    def _widths(self, cut: _Cut, dim: int) -> Widths:
        """Return this rank's width and the whole width of a matrix's outputs (``dim`` 0) or inputs (``dim`` 1)."""
        dim = 1 - dim if _transposed(cut.module) else dim
        return Widths(self._placement(cut).local_shape[dim], cut.row.shape[dim])


class _Together:
    """Matrices that share their input: the first matrix's call computes all products, later calls return them."""

    def __init__(self, matrices: Sequence[Projection], team: Team, random: Random | None) -> None:
        self._matrices, self._team, self._random = matrices, team, random
        self._x: torch.Tensor | None = None
        self._made: dict[int, torch.Tensor] = {}

    def product(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Return the product of ``x`` with this rank's rows of the matrix with index ``number``."""
        if self._x is not x or number not in self._made:
            self._made = dict(enumerate(columns(x, self._matrices, self._team)))
            self._x = x
        out = self._made.pop(number)
        if not self._made:
            self._x = None
        if self._random is not None:
            self._random.enter()
        return out


class _Transposed(Foreign):
    """Presents a ``Conv1D`` of transformers, whose weight is ``[in, out]``, as a projection."""

    @property
    def weight(self) -> torch.Tensor:
        """Weight ``[out, in]``."""
        return super().weight.T


def _transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"


def _styles(cuts: Iterable[_Cut]) -> dict[str, set[str]]:
    """Return the styles in which the matrices of each parent module are cut, by the parent module's name."""
    styles_by_parent: dict[str, set[str]] = {}
    for cut in cuts:
        if isinstance(cut.module, nn.Linear) or _transposed(cut.module):
            styles_by_parent.setdefault(cut.name.rpartition(".")[0], set()).add(cut.row.style)
    return styles_by_parent


def _gets_parts(name: str, styles: Mapping[str, set[str]]) -> bool:
    """Return True if the input of a row-cut matrix is already cut, because a column-cut matrix made it.

    The column-cut matrix is a sibling of the row-cut matrix, or in a sibling of the parent module, as in BERT. The
    rank's shapes cannot decide this: one rank may hold all heads, and the other ranks none.
    """
    parent = name.rpartition(".")[0]
    if "column" in styles[parent]:
        return True
    above = parent.rpartition(".")[0]
    beside = (group_styles for group, group_styles in styles.items() if group.rpartition(".")[0] == above)
    return any("column" in group_styles and "row" not in group_styles for group_styles in beside)


def _matrix(module: nn.Module) -> Projection:
    if isinstance(module, Adapted):
        return module
    return _Transposed(module) if _transposed(module) else Foreign(module)


def _gathering(
    product: Callable[[torch.Tensor], torch.Tensor],
    widths: tuple[int, ...],
    team: Team,
    random: Random | None,
    x: torch.Tensor,
) -> torch.Tensor:
    out = gather_from_tp(product(x), widths, team)
    if random is not None:
        random.leave()
    return out


def _embed(embed: nn.Embedding, first: int, team: Team, tokens_BS: torch.Tensor) -> torch.Tensor:
    """Return the tokens' embeddings, ``[B, S, H]``; the padding token gets no gradient, as in ``nn.Embedding``."""
    rows = embed.weight.shape[0]
    if rows == 0:
        nothing = embed.weight.sum() + embed.weight.new_zeros(*tokens_BS.shape, embed.weight.shape[1])
        return reduce_from_tp(nothing, team)
    local_BS = tokens_BS - first
    inside_BS = (local_BS >= 0) & (local_BS < rows)
    padding = None if embed.padding_idx is None else embed.padding_idx - first
    here = padding if padding is not None and 0 <= padding < rows else None
    rows_BSH = F.embedding(local_BS.where(inside_BS, 0), embed.weight, here)
    scale = getattr(embed, "embed_scale", None)
    rows_BSH = rows_BSH if scale is None else rows_BSH * scale.to(rows_BSH.dtype)
    return reduce_from_tp(rows_BSH * inside_BS.unsqueeze(-1), team)


@dataclass(frozen=True, slots=True)
class HeadVocabularyLoss:
    """Loss of a head module of which each rank holds the rows of some tokens of the vocabulary."""

    team: Team
    first: int
    """Index of the first vocabulary token that this rank holds."""

    def __call__(self, hidden: torch.Tensor, head: nn.Linear, labels_BS: torch.Tensor, **how: Any) -> torch.Tensor:
        """Return :func:`partool_runtime.parallel.tensor.vocabulary.vocabulary_loss`."""
        bias_V = head.bias
        return vocabulary_loss(hidden, head.weight, labels_BS, first=self.first, team=self.team, bias_V=bias_V, **how)


def _summed_outputs(
    forward: Callable[[torch.Tensor], torch.Tensor], widths: Sequence[tuple[int, int]], team: Team, x: torch.Tensor
) -> torch.Tensor:
    """Multiply by a matrix that all ranks hold; the gradients of some outputs are partial sums and get all-reduced."""
    out = forward(x)
    cuts = sorted({0, out.shape[-1], *(edge for width in widths for edge in width)})
    parts = []
    for span in pairwise(cuts):
        part = out[..., span[0] : span[1]]
        parts.append(copy_to_tp(part, team) if span in widths else part)
    return torch.cat(parts, dim=-1)


def _experts(forward: Callable[..., torch.Tensor], team: Team, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run experts that are cut by their inner widths; sum the outputs and the inputs' gradients over the ranks."""

    def enter(value: Any) -> Any:
        return copy_to_tp(value, team) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    out = forward(enter(hidden), *map(enter, args), **{name: enter(value) for name, value in kwargs.items()})
    return reduce_from_tp(out, team)
