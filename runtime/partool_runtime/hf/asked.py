"""Finds the form of a transformers model's attention by running the model's code on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import nn

from partool_runtime.hf.attention import NAME, MaskStandIn, place, register, unknown_options, watching
from partool_runtime.hf.building import base_name, blocks_name, head_name
from partool_runtime.hf.numerics import KeepWide
from partool_runtime.model.attention import AttentionLayout, visible

_TOKENS = 4


class AttentionAsked(NamedTuple):
    """The form of a layer's attention."""

    window: int | None
    """Number of tokens that a token attends to, including itself; None means all earlier tokens."""
    dropout: float
    """Share of attention weights that are dropped in training."""


class UnknownAttentionError(Exception):
    """The model's attention has no known form; the error's text gives the reason."""


def asked(causal: nn.Module, layers: int) -> list[AttentionAsked]:
    """Return the form of each layer's attention, or raise :class:`UnknownAttentionError`.

    First the base model runs with stand-ins in place of its layers; each stand-in records its arguments. Then each
    layer runs on the meta device up to its attention.
    """
    register()
    base = causal.get_submodule(base_name(causal))
    blocks = blocks_name(base, layers)
    given = _given(base, blocks, layers, _hidden_size(causal))
    forms = []
    for block, (arguments, options) in zip(cast(nn.ModuleList, base.get_submodule(blocks)), given, strict=True):
        layer = copy.deepcopy(block).to("meta", torch.float64).train()
        place(layer, _answer)
        forms.append(_asked(layer, arguments, options))
    return forms


class _AnswerError(Exception):
    """Exception that carries the arguments of a layer's attention out of the layer's forward pass."""

    def __init__(self, form: AttentionAsked | None, why: str = "") -> None:
        super().__init__(why)
        self.form, self.why = form, why


class _Noting(nn.Module):
    """Stand-in for a layer that records its arguments."""

    def __init__(self, as_tuple: bool) -> None:
        super().__init__()
        self.as_tuple = as_tuple
        self.given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.given = (args, kwargs)
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden,) if self.as_tuple else hidden


class _Zeros(nn.Module):
    """Stand-in for an embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*places.shape, self.width)


def _given(base: nn.Module, blocks: str, layers: int, hidden: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return, for each layer, the positional and keyword arguments that the base model passes to the layer."""
    why = ""
    for as_tuple in (False, True):
        part = copy.copy(base)
        part.__dict__["_modules"] = dict(base._modules)
        for name, module in base.named_children():
            if isinstance(module, nn.Embedding):
                part._modules[name] = _Zeros(module.embedding_dim)
            elif any(True for _ in module.parameters()):
                part._modules[name] = nn.Identity()
        noting = [_Noting(as_tuple) for _ in range(layers)]
        part._modules[blocks] = nn.ModuleList(noting)
        part.__dict__["config"] = copy.copy(base.config)
        cast(Any, part).config._attn_implementation = NAME
        positions = torch.arange(_TOKENS)[None]
        try:
            with torch.no_grad(), watching(_check_mask):
                cast(Any, part)(
                    inputs_embeds=torch.zeros(1, _TOKENS, hidden),
                    position_ids=positions,
                    use_cache=False,
                    return_dict=True,
                )
        except UnknownAttentionError:
            raise
        except Exception as error:  # a model's own code may raise anything
            why = why or f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            continue
        return [note.given for note in noting]
    raise UnknownAttentionError(f"its base model does not take a hidden state and positions ({why})")


def _check_mask(described: Mapping[str, Any]) -> None:
    """Raise :class:`UnknownAttentionError` if a mask is not causal; a causal mask may have a window."""
    window = described.get("local_size")
    places = sorted({0, 1, 2, 3, *(w + d for w in ([window, 2 * window] if window else [64]) for d in (-1, 0, 1))})
    places_S = torch.tensor([p for p in places if p >= 0])
    if described.get("use_vmap"):
        raise UnknownAttentionError("its masks are not only causal, with or without a window")
    seen = described["mask_function"](0, 0, places_S[:, None], places_S[None, :])
    expected_SS = visible(places_S, places_S, AttentionLayout(window))
    if not torch.equal(torch.as_tensor(seen).expand_as(expected_SS), expected_SS):
        raise UnknownAttentionError("its masks are not only causal, with or without a window")


def _asked(layer: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> AttentionAsked:
    try:
        with torch.no_grad(), KeepWide():
            layer(*_on_meta(arguments), **_on_meta(options))
    except _AnswerError as answer:
        if answer.form is None:
            raise UnknownAttentionError(answer.why) from None
        return answer.form
    except Exception as error:  # a model's own code may raise anything
        first = (str(error).splitlines() or [""])[0]
        if MaskStandIn.__name__ in first:
            raise UnknownAttentionError("its layers compute with masks themselves") from error
        raise UnknownAttentionError(f"its layers cannot be followed ({type(error).__name__}: {first})") from error
    raise UnknownAttentionError("its attention does not go through the interface of transformers")


def _answer(
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    seen: Any,
    scaling: float | None,
    dropout: float,
    options: Mapping[str, Any],
) -> NoReturn:
    """Stand-in for a layer's attention, called like ``HfAttention``; it raises the attention's form as an exception."""
    q_BNSD, k_BKSD, v_BKSD = heads
    window, unknown = options.get("sliding_window"), unknown_options(options)
    if not isinstance(seen, MaskStandIn):
        raise _AnswerError(None, "its attention gets no mask of transformers")
    if unknown:
        raise _AnswerError(None, f"its attention uses {', '.join(unknown)}")
    if window not in (None, seen.window):
        raise _AnswerError(None, f"a layer with a mask of a window of {seen.window} asks for one of {window}")
    if k_BKSD.shape[1] != v_BKSD.shape[1] or q_BNSD.shape[1] % k_BKSD.shape[1] or q_BNSD.shape[2] != k_BKSD.shape[2]:
        raise _AnswerError(None, "its heads of queries do not share those of keys evenly")
    raise _AnswerError(AttentionAsked(seen.window, float(dropout)))


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta", torch.float64 if value.is_floating_point() else value.dtype)
    if isinstance(value, dict):
        return {name: _on_meta(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(map(_on_meta, value))
    return value


def _hidden_size(causal: nn.Module) -> int:
    return cast(nn.Linear, causal.get_submodule(head_name(causal))).in_features
