"""Rules about ``model.moe``: routers, groups of experts, and layers whose experts differ from the others'."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from partool.diagnostics.record import Diagnostic
from partool.spec.experts import Moe, layer_range, ranges

if TYPE_CHECKING:
    from partool.spec.spec import Spec

_PATH: tuple[str, ...] = ("model", "moe")


def check_experts(spec: Spec) -> Iterator[Diagnostic]:
    """Yield findings about experts that cannot be chosen, groups that cannot be formed, and layers that differ."""
    moe = spec.model.moe
    if moe is None:
        return
    yield from _choices(moe, frozenset(("experts", "top_k", "ffn_hidden")), _PATH)
    if moe.residual and not moe.shared_experts:
        message = "residual: true weighs the shared experts against the routed ones, but there are no shared experts"
        help = "add shared_experts: 1, or drop residual"
        yield Diagnostic("PT256", message, path=(*_PATH, "residual"), help=help)
    if moe.layers is not None:
        yield from _keys(moe)
        for key, layers, shape in ranges(moe.layers):
            given = frozenset(shape.given) - ({"top_k"} if shape.top_k == moe.top_k else set())
            if given & {"experts", "top_k"}:
                yield from _choices(moe.of_layer(layers.start), given, (*_PATH, "layers", key))
        yield from expert_layers(moe, spec.model.layers)


def _choices(moe: Moe, given: frozenset[str], path: tuple[str, ...]) -> Iterator[Diagnostic]:
    """Yield findings about the choices of a layer's router; ``given`` are the fields that stand at ``path``."""
    if moe.top_k > moe.experts:
        message = f"top_k: {moe.top_k} is more than the {moe.experts} experts"
        name = "top_k" if "top_k" in given else "experts"
        help = f"use at most {moe.experts}" if name == "top_k" else f"use {moe.top_k} or more, or add top_k here"
        yield Diagnostic("PT210", message, path=(*path, name), help=help)
    else:
        yield from _groups(moe, path)
    if moe.top_k == 1 and moe.normalise and "top_k" in given:
        message = (
            "normalise: true makes the only weight of each token 1, so that the model's loss does not train the router"
        )
        help = "write normalise: false, as Switch Transformers (arXiv 2101.03961, section 2.1), or use top_k: 2"
        yield Diagnostic("PT240", message, severity="warning", path=(*_PATH, "normalise"), help=help)


def _groups(moe: Moe, path: tuple[str, ...]) -> Iterator[Diagnostic]:
    of_layers = path != _PATH

    def at(name: str) -> tuple[str, ...]:
        return path if of_layers else (*path, name)

    if moe.experts % moe.groups:
        message = f"{moe.experts} experts cannot be divided into {moe.groups} groups"
        help = f"use a multiple of {moe.groups}" if of_layers else f"use a divisor of {moe.experts}"
        yield Diagnostic("PT237", message, path=at("groups"), help=help)
    elif moe.top_groups > moe.groups:
        if not of_layers:
            message = f"top_groups: {moe.top_groups} is more than the {moe.groups} groups"
            yield Diagnostic("PT237", message, path=at("top_groups"), help=f"use at most {moe.groups}")
    elif moe.top_k > (most := moe.top_groups * (moe.experts // moe.groups)):
        message = f"top_k: {moe.top_k} is more than the {most} experts of {moe.top_groups} of {moe.groups} groups"
        yield Diagnostic("PT237", message, path=at("top_k"), help=f"use at most {most}, or more groups")
    elif moe.groups > 1 and moe.group_score == "top2" and moe.experts == moe.groups:
        message = "group_score: top2 adds two scores, and the groups have one expert each"
        yield Diagnostic("PT237", message, path=at("group_score"), help="use group_score: max")


def _keys(moe: Moe) -> Iterator[Diagnostic]:
    """Yield findings about keys that are no layers, that name a layer twice, or that change nothing."""
    for key, shape in (moe.layers or {}).items():
        path = (*_PATH, "layers", key)
        if layer_range(key) is None:
            help = 'write a layer, such as "11", or a range with the lower layer first, such as "12-23"'
            yield Diagnostic("PT413", f"{key!r} is no layer and no range of layers", path=path, help=help)
        elif not shape.given:
            help = "give experts, top_k or ffn_hidden, or drop the key"
            yield Diagnostic("PT413", f"{key!r} says nothing about its layers", path=path, help=help)
    before = ("", range(0))
    for key, layers, _ in ranges(moe.layers):
        if layers.start < before[1].stop:
            message = f"layer {layers.start} is in {before[0]!r} and in {key!r}"
            yield Diagnostic("PT413", message, path=(*_PATH, "layers", key), help="name each layer once")
        before = max(before, (key, layers), key=lambda one: one[1].stop)


def expert_layers(moe: Moe, layers: int | None) -> Iterator[Diagnostic]:
    """Yield findings about keys of ``moe.layers`` that name layers which a model of ``layers`` lacks or has dense.

    None stands for a number of layers that is not decided yet: then only dense layers are found.
    """
    for key, mine, _ in ranges(moe.layers):
        path = (*_PATH, "layers", key)
        if layers is not None and mine.stop > layers:
            message = f"{key!r} names layer {mine.stop - 1}, and the last of the {layers} layers is {layers - 1}"
            yield Diagnostic("PT413", message, path=path, help=f"use layers 0 to {layers - 1}")
            continue
        dense = [layer for layer in mine if not moe.has_experts(layer)]
        if dense and (len(dense) == len(mine) or mine.start < moe.first_dense_layers):
            with_experts = next(layer for layer in range(mine.start, mine.start + 10**7) if moe.has_experts(layer))
            why = "first_dense_layers" if dense[0] < moe.first_dense_layers else "every"
            message = f"{key!r} names layer {dense[0]}, which {why}: {getattr(moe, why)} leaves dense"
            help = f"begin with layer {with_experts}, which has experts"
            yield Diagnostic("PT413", message, path=path, help=help)
