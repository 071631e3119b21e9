"""Reads the experts of each layer from Megatron-DeepSpeed's ``--num-experts``, a number or a list of numbers.

Which layers the numbers of a list are for is said by ``get_num_experts_per_layer`` in
``megatron/model/transformer.py`` (https://github.com/deepspeedai/Megatron-DeepSpeed): of every ``expert-interval``
layers the last one has experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from partool.engines.fields import complaint
from partool.engines.settings import Sheet, shown, whole_of

_NAME, _TO = "num-experts", "model.moe.experts"


def expert_numbers(sheet: Sheet) -> list[int]:
    """Return the experts of each layer that has experts, in the order of layers.

    One number stands for all of these layers. The list is empty if there are no experts, or if a number is a finding.
    """
    given = sheet.get(_NAME, to=_TO)
    if not isinstance(given, tuple):
        number: int = sheet.integer(_NAME, 0, to=_TO, least=0)
        return [number] if number > 1 else []
    numbers: list[int] = []
    for each in given:
        number = whole_of(each) or 0
        reason = complaint(_TO, number) if number else "whole numbers from 1 on are expected"
        if reason is not None:
            message = f"{_NAME} has {shown(each)}, and {reason}"
            sheet.say("PT820", "error", message, "write one number for each layer of experts", _NAME)
            return []
        numbers.append(number)
    if 1 in numbers and max(numbers) > 1:
        message = f"{_NAME} has 1 beside other numbers: such a layer is dense, at a place for which there is no field"
        sheet.say("PT823", "error", message, "write more than one expert for each layer of experts", _NAME)
        return []
    return numbers


def by_layer(sheet: Sheet, numbers: list[int], layers: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``model.moe`` that say which layers have which of several numbers of experts.

    ``fields`` are those of ``model.moe`` so far. There are none if one number stands for all layers. Places are exact:
    without a list, ``expert-interval`` is read as ``every``, which has as many layers of experts, one place earlier.
    """
    if len(numbers) == 1 or not layers:
        return {}
    first, every = fields.get("first_dense_layers", 0), fields.get("every", 1)
    if "moe-layer-freq" not in sheet.settings:
        first = every - 1
    places = range(first, layers, every)
    if len(places) != len(numbers):
        message = f"{_NAME} has {len(numbers)} numbers, and {len(places)} of the {layers} layers have experts"
        sheet.say("PT823", "error", message, "write one number, or one for each of these layers", _NAME, "num-layers")
        return {}
    different: dict[str, dict[str, int]] = {}
    for number, pairs in groupby(zip(numbers, places, strict=True), key=lambda pair: pair[0]):
        run = [place for _, place in pairs]
        if number != numbers[0]:
            different[str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"] = {"experts": number}
    return ({"first_dense_layers": first} if first else {}) | ({"layers": different} if different else {})
