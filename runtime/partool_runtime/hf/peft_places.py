"""Where PEFT holds an adapter's matrices, and their values in the form of modules that transformers joins.

PEFT (0.21) has one A and one B for a module. Where transformers joins matrices that partool keeps apart, the adapters
of the parts become one of as many times the rank, whose B is zero outside of the blocks of the parts: the sum is the
same.
Experts' matrices are tensors ``[E, out, in]`` of one module, with A ``[E · r, in]``, expert after expert, and B
``[out, r · E]``, in which experts change fastest (``ParamWrapper`` in peft/tuners/lora/layer.py). Of two tensors of a
module, the wrapper of the second encloses that of the first, which is its ``base_layer``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from partool.layout.adapters import MAGNITUDE, A, B
from partool.spec.model import ModelConfig
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.experts import EXPERT_NAMES
from partool_runtime.hf.families import Family, place_of
from partool_runtime.hf.places import ParameterPlace
from partool_runtime.hf.stored import row_order

PREFIX = "base_model.model."
PEFT_ENDINGS = {A: "lora_A.weight", B: "lora_B.weight", MAGNITUDE: "lora_magnitude_vector"}
_QUERIES_KEYS_VALUES = ("q", "k", "v")


@dataclass(frozen=True, slots=True)
class PeftPlace:
    """A module of transformers, or a tensor of experts, and the projections of partool's that it joins."""

    target: str
    """Name of the module, or of the experts' tensor."""
    owner: str
    """Path of PEFT's layer in its state."""
    parts: tuple[str, ...]
    """Projections in the order of their rows; one for a module that joins nothing."""
    rows: tuple[int, ...]
    """Number of rows of each part, of experts that of one expert."""
    experts: int = 0
    """Number of experts whose matrices the tensor holds; 0 for a module."""
    order: torch.Tensor | None = None
    """Rows of the module in partool's order, if transformers has another one."""

    def key(self, ending: str) -> str:
        """Return the name of A, B or the magnitudes in PEFT's files."""
        return f"{PREFIX}{self.owner}.{PEFT_ENDINGS[ending]}"

    @property
    def matrices(self) -> int:
        """Number of matrices that are stacked in A and B."""
        return max(1, self.experts)

    def joined(self, adapters: Mapping[str, Mapping[str, torch.Tensor]], rank: int) -> dict[str, torch.Tensor]:
        """Return PEFT's tensors by name, of the parts' tensors by their endings; a part without any has zeros.

        Raises ConfigurationError PT624 for DoRA of some of the parts: PEFT needs the norms of all rows.
        """
        parts = [adapters.get(part) for part in self.parts]
        some = next(part for part in parts if part is not None)
        count, columns, ranks = self.matrices, some[A].shape[1], len(parts) * rank
        a = some[A].new_zeros(count, ranks, columns)
        b = some[B].new_zeros(count, sum(self.rows), ranks)
        first = 0
        for number, (part, rows) in enumerate(zip(parts, self.rows, strict=True)):
            if part is not None:
                block = slice(number * rank, (number + 1) * rank)
                a[:, block] = part[A].view(count, rank, columns)
                b[:, first : first + rows, block] = part[B].view(count, rows, rank)
            first += rows
        tensors = {A: a.flatten(0, 1), B: b.permute(1, 2, 0).flatten(1)}
        if MAGNITUDE in some:
            if any(part is None for part in parts):
                missing = ", ".join(each for each, part in zip(self.parts, parts, strict=True) if part is None)
                message = f"PEFT's format needs magnitudes of all rows of {self.target}, and {missing} has no adapter"
                raise ConfigurationError("PT624", message, "partool export --merge writes the whole model.")
            tensors[MAGNITUDE] = torch.cat([part[MAGNITUDE] for part in parts if part is not None])
        if self.order is not None:
            tensors |= {each: tensors[each][self.order.argsort()] for each in (B, MAGNITUDE) if each in tensors}
        return {self.key(ending): tensor for ending, tensor in tensors.items()}

    def shapes(self, ending: str, shape: tuple[int, ...], rank: int) -> list[tuple[int, ...]]:
        """Return the shapes that PEFT's tensor may have: the parts have an A each, or share one."""
        if ending == MAGNITUDE:
            return [(sum(self.rows),)]
        numbers = dict.fromkeys((1, len(self.parts)))
        if ending == A:
            return [(number * shape[0], shape[1]) for number in numbers]
        return [(sum(self.rows), number * rank * self.matrices) for number in numbers]

    def part(self, tensor: torch.Tensor, part: str, ending: str, rank: int) -> torch.Tensor:
        """Return the tensor of one of the parts, from PEFT's tensor of the module."""
        if self.order is not None and ending != A:
            tensor = tensor[self.order]
        number = self.parts.index(part)
        first = sum(self.rows[:number])
        rows = slice(first, first + self.rows[number])
        if ending == MAGNITUDE:
            return tensor[rows]
        if ending == A:
            split = tensor.view(self.matrices, -1, tensor.shape[1])
        else:
            split = tensor.view(len(tensor), -1, self.matrices).permute(2, 0, 1)[:, rows]
        dim = 1 if ending == A else 2
        shares = split.shape[dim] == rank
        mine = split if shares else split.narrow(dim, number * rank, rank)
        return mine.flatten(0, 1)


class PeftPlaces:
    """The places of all adapters of a model, by projection."""

    def __init__(self, config: ModelConfig, family: Family | None, projections: Collection[str]) -> None:
        """``family`` None is a model of transformers, whose projections are modules."""
        self._config, self._family, self._projections = config, family, frozenset(projections)

    def of(self, projection: str, rows: int) -> PeftPlace:
        """Return the place of a projection whose matrix has ``rows`` rows, of experts all of them."""
        if self._family is None:
            return PeftPlace(projection, projection, (projection,), (rows,))
        place = place_of(self._family, f"{projection}.weight")
        assert place is not None, f"{projection} has no place in {self._family.model_type}"
        if place.turns is not None:
            message = f"PEFT's format cannot hold the adapter of {projection}, whose outputs take turns with others in"
            fix = "Train adapters of attention alone: adapter.targets: ['*.attention.*']."
            raise ConfigurationError("PT624", f"{message} {place.name}", fix)
        beside = projection.rpartition(".")[0]
        if place.stack:
            return self._of_experts(place, beside, rows)
        module = place.name.removesuffix(".weight")
        if place.part:
            heads = {"q": self._config.heads, "k": self._config.kv_heads, "v": self._config.kv_heads}
            parts = tuple(f"{beside}.{part}" for part in _QUERIES_KEYS_VALUES)
            widths = tuple(heads[part] * self._config.head_dim for part in _QUERIES_KEYS_VALUES)
            return PeftPlace(module, module, parts, widths)
        order = None
        if place.rotated and self._config.mla is not None:
            order = row_order(self._config.mla, place.rotated, rows)
        return PeftPlace(module, module, (projection,), (rows,), order=order)

    def _of_experts(self, place: ParameterPlace, beside: str, rows: int) -> PeftPlace:
        moe, family = self._config.moe, self._family
        assert moe is not None, "experts of a model without experts"
        assert family is not None, "a model of transformers"
        # In memory the module is called mlp whatever folders call it.
        target = place.stack.replace(f".{EXPERT_NAMES[family.model_type].block}.", ".mlp.")
        owner, _, tensor = target.rpartition(".")
        first = ("gate", "up")
        if tensor == "down_proj":
            return PeftPlace(target, owner, (f"{beside}.down",), (rows // moe.experts,), moe.experts)
        inner = ".base_layer" if f"{beside}.down" in self._projections else ""
        parts = tuple(f"{beside}.{each}" for each in first)
        return PeftPlace(target, owner + inner, parts, (rows // moe.experts,) * 2, moe.experts)
