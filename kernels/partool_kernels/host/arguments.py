"""Checks of the arguments of optimizer passes, made before any pointer is passed to the compiled library."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from partool_kernels.host.types import MOMENTS, HostKernelError, Part, StepRule, UpdatePass

if TYPE_CHECKING:
    import torch

CODES = {"torch.float32": 0, "torch.float64": 1, "torch.bfloat16": 2, "torch.float16": 3}
"""Number that stands for each element type in the compiled library."""
_STATES, _FLOATS = frozenset({0, 1}), frozenset(CODES.values())
_BFLOAT16 = CODES["torch.bfloat16"]


class Taken:
    """Tensors whose addresses are passed to an optimizer pass, each with a flag that is true if the pass writes it."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int, bool, str]] = []

    def take(
        self, tensor: torch.Tensor, what: str, *, elements: int | None, types: frozenset[int], writes: bool
    ) -> tuple[int, int]:
        """Return a tensor's address and the code of its type.

        Raises :class:`HostKernelError` unless the tensor is contiguous, is in host memory, has a type among ``types``,
        and has ``elements`` elements (None allows any number).
        """
        code = CODES.get(str(tensor.dtype), -1)
        if code not in types:
            allowed = ", ".join(name.removeprefix("torch.") for name, number in CODES.items() if number in types)
            raise HostKernelError(f"{what} is of type {tensor.dtype}; it has to be {allowed}")
        if tensor.device.type != "cpu":
            raise HostKernelError(f"{what} is on {tensor.device}, not in host memory")
        if tensor.layout is not _strided() or not tensor.is_contiguous():
            raise HostKernelError(f"{what} is not contiguous")
        if tensor.is_conj() or tensor.is_neg():
            raise HostKernelError(f"{what} is a view that has to be resolved first")
        size = tensor.numel()
        if elements is not None and size != elements:
            raise HostKernelError(f"{what} has {size} elements, not {elements}")
        if size == 0:
            return 0, code
        address = tensor.data_ptr()
        if address == 0:
            raise HostKernelError(f"{what} has no memory")
        self._spans.append((address, address + size * tensor.itemsize, writes, what))
        return address, code

    def check(self) -> None:
        """Raise :class:`HostKernelError` where a tensor that the pass writes overlaps another tensor of the pass."""
        read_to = written_to = 0
        reads = writes_by = ""
        for first, end, writes, what in sorted(self._spans):
            if first < written_to or (writes and first < read_to):
                other = writes_by if first < written_to else reads
                raise HostKernelError(f"{what} and {other} share memory, and a pass writes there")
            if writes and end > written_to:
                written_to, writes_by = end, what
            if not writes and end > read_to:
                read_to, reads = end, what


def check_rules(parts: Sequence[Part], steps: Iterable[UpdatePass], weights: Sequence[torch.Tensor] | None) -> None:
    """Raise :class:`HostKernelError` where a list does not have one tensor per part, or a rule does not fit a part."""
    for step in steps:
        if len(step.gradients) != len(parts):
            raise HostKernelError(f"{len(step.gradients)} gradients for {len(parts)} parts")
        for rule in step.rules:
            _check_rule(rule)
    if weights is not None and len(weights) != len(parts):
        raise HostKernelError(f"{len(weights)} tensors for weights of {len(parts)} parts")
    for index, part in enumerate(parts):
        for step in steps:
            if not 0 <= part.group < len(step.rules):
                raise HostKernelError(f"part {index} is of group {part.group} of {len(step.rules)}")
            wanted = len(MOMENTS[step.rules[part.group].kind])
            if len(part.moments) != wanted:
                kind = step.rules[part.group].kind
                raise HostKernelError(f"part {index} has {len(part.moments)} moments; {kind} keeps {wanted}")


def _check_rule(rule: StepRule) -> None:
    if rule.kind not in MOMENTS:
        raise HostKernelError(f"there is no optimizer {rule.kind!r}; there are {', '.join(MOMENTS)}")
    if rule.step < 1:
        raise HostKernelError(f"steps are counted from 1, not {rule.step}")
    numbers = (rule.lr, rule.beta1, rule.beta2, rule.eps, rule.weight_decay, rule.scale)
    if not all(map(math.isfinite, numbers)):
        raise HostKernelError(f"{rule} has a number that is not finite")
    if rule.kind == "adamw" and not (0 <= rule.beta1 < 1 and 0 <= rule.beta2 < 1):
        raise HostKernelError(f"{rule} needs betas from 0 to below 1")


def master_of(taken: Taken, index: int, part: Part, *, writes: bool) -> tuple[int, int]:
    """Return the address and the type code of a part's master weights."""
    return taken.take(part.master, f"the master of part {index}", elements=None, types=_STATES, writes=writes)


def moments_of(taken: Taken, index: int, part: Part, state: int, *, writes: bool) -> list[tuple[int, int]]:
    """Return the address and the type code of each of a part's two moments; for a missing moment (0, -1)."""
    types, elements = frozenset({state, _BFLOAT16}), part.master.numel()
    moments = [
        taken.take(moment, f"moment {number} of part {index}", elements=elements, types=types, writes=writes)
        for number, moment in enumerate(part.moments)
    ]
    return moments + [(0, -1)] * (2 - len(moments))


def other_of(
    taken: Taken, tensors: Sequence[torch.Tensor] | None, index: int, what: str, *, elements: int | None, writes: bool
) -> tuple[int, int]:
    """Return the address and the type code of ``tensors[index]``, or (0, -1) if ``tensors`` is None."""
    if tensors is None:
        return 0, -1
    return taken.take(tensors[index], f"{what} {index}", elements=elements, types=_FLOATS, writes=writes)


def _strided() -> torch.layout:
    import torch

    return torch.strided
