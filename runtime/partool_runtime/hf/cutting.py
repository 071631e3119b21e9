"""Checks that partool can train a transformers model, by running the model's code with stand-in modules."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from partool_runtime.hf.building import base_name, blocks_name, head_name

_TOKENS = 4
_ANSWERS = (False, True)


class Passing(nn.Module):
    """Stand-in for a layer that another pipeline rank holds; it returns the hidden state unchanged."""

    def __init__(self, as_tuple: bool) -> None:
        super().__init__()
        self.as_tuple = as_tuple
        """Whether the model's layers return tuples, the hidden state first."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return ``hidden_states``."""
        return (hidden_states,) if self.as_tuple else hidden_states


def cut_base(base: nn.Module, blocks: str, kept_layers: range, *, as_tuple: bool) -> nn.Module:
    """Return a base model that shares the modules of ``base`` and runs only the layers in ``kept_layers``.

    Every layer keeps its index in the list of layers, since models look up masks and attention kinds by this index.
    Without the last layer, modules after the list are skipped; without the first layer the base model takes a hidden
    state as ``inputs_embeds``.
    """
    part = copy.copy(base)
    part.__dict__["_modules"] = dict(base._modules)
    layers = list(cast(nn.ModuleList, base.get_submodule(blocks)))
    stands = [layer if number in kept_layers else Passing(as_tuple) for number, layer in enumerate(layers)]
    names = list(base._modules)
    for name in names[names.index(blocks) + 1 :]:
        if kept_layers.stop < len(layers) and any(True for _ in base.get_submodule(name).parameters()):
            part._modules[name] = nn.Identity()
    for name, module in base.named_children():
        if kept_layers.start > 0 and isinstance(module, nn.Dropout):
            part._modules[name] = nn.Identity()
        elif kept_layers.start > 0 and isinstance(module, nn.Embedding):
            part._modules[name] = _Absent(name)
    part._modules[blocks] = nn.ModuleList(stands)
    return part


def returns_tuples(causal: nn.Module, layers: int) -> bool | str:
    """Return True if the model's layers return tuples, else False; return a reason if pipeline stages cannot be cut.

    A base model without any layer, given a hidden state, must return it unchanged.
    """
    base = causal.get_submodule(base_name(causal))
    blocks = blocks_name(base, layers)
    given = torch.arange(_TOKENS * _hidden_size(causal), dtype=torch.float32).view(1, _TOKENS, -1)
    why = ""
    for as_tuple in _ANSWERS:
        part = _without_layers(base, blocks, layers, as_tuple)
        try:
            with torch.no_grad():
                hidden = part(inputs_embeds=given.clone(), use_cache=False, return_dict=True)[0]
        except Exception as error:  # a model's own code may raise anything
            why = why or f"it cannot start from a hidden state ({type(error).__name__}: {str(error).splitlines()[0]})"
            continue
        if isinstance(hidden, torch.Tensor) and hidden.shape == given.shape and torch.equal(hidden, given):
            return as_tuple
        why = "it changes a hidden state that it is given, outside of its layers"
    return why


def head_problem(causal: nn.Module) -> str:
    """Return why logits are not one product of last hidden state and head; an empty text if they are one product."""
    base, head = causal.get_submodule(base_name(causal)), causal.get_submodule(head_name(causal))
    hidden = _hidden_size(causal)
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(1, _TOKENS, hidden, generator=generator)
    weight = torch.randn(5, hidden, generator=generator)
    base.__dict__["forward"] = lambda *args, **kwargs: _Output(given)
    head.__dict__["forward"] = lambda x: F.linear(x, weight)
    try:
        with torch.no_grad():
            logits = causal(
                input_ids=torch.zeros(1, _TOKENS, dtype=torch.long), use_cache=False, return_dict=True
            ).logits
    except Exception as error:  # a model's own code may raise anything
        return f"its forward pass cannot be followed ({type(error).__name__}: {str(error).splitlines()[0]})"
    finally:
        del base.__dict__["forward"], head.__dict__["forward"]
    expected = F.linear(given, weight)
    if logits.shape == expected.shape and torch.equal(logits, expected):
        return ""
    return "it does more than one product between its last hidden state and its logits, such as scaling or capping"


class _Absent(nn.Module):
    """Stand-in for an embedding that a pipeline rank does not hold."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, *args: Any) -> torch.Tensor:
        raise LookupError(f"it looks up {self.name}")


class _Output:
    """Stand-in for a base model's output; it has the hidden state, and None as any other field."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, place: Any) -> Any:
        return self.last_hidden_state if place == 0 else ()


def _without_layers(base: nn.Module, blocks: str, layers: int, as_tuple: bool) -> nn.Module:
    """Return a base model reduced to the modules that all pipeline stages run."""
    middle = cut_base(base, blocks, range(1, layers), as_tuple=as_tuple)
    names = list(base._modules)
    for name in names[names.index(blocks) + 1 :]:
        if any(True for _ in base.get_submodule(name).parameters()):
            middle._modules[name] = nn.Identity()
    middle._modules[blocks] = nn.ModuleList(Passing(as_tuple) for _ in range(layers))
    return middle


def _hidden_size(causal: nn.Module) -> int:
    return cast(nn.Linear, causal.get_submodule(head_name(causal))).in_features
