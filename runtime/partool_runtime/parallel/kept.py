"""Results of operators that a layer's recomputation takes from the first pass, where layers are sharded inside.

torch's own contexts for selective recomputation count the calls of every operator, and fail where FSDP2 gathers the
parameters of a module within the layer in one pass only. These contexts count the kept operators only.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection
from typing import Any

import torch

from partool_runtime.parallel import second_pass
from partool_runtime.torch_internals.tensors import TorchDispatchMode

KeptResults = defaultdict[Any, deque[Any]]
"""Results of the first pass by operator, in the order of the calls."""


def contexts(kept: Collection[Any]) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return contexts of the first and of the second pass of a layer; ``kept`` are operators."""
    results: KeptResults = defaultdict(deque)
    return _KeepResults(kept, results), _ReuseResults(kept, results)


def _detached(result: Any) -> Any:
    """Return an operator's result, a tensor or several, without its autograd graph; some results are not tensors."""
    if isinstance(result, tuple | list):
        return tuple(map(_detached, result))
    return result.detach() if isinstance(result, torch.Tensor) else result


class _KeepResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps results, but not those of tiles, which together would be as large as results of the whole sequence."""

    def __init__(self, kept: Collection[Any], results: KeptResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._results = kept, results

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and keep its results if they are wanted."""
        out = func(*args, **(kwargs or {}))
        if func in self._kept and not second_pass.is_tile():
            self._results[func].append(_detached(out))
        return out


class _ReuseResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, kept: Collection[Any], results: KeptResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._results = kept, results

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return an operator's kept results, or run it."""
        if func in self._kept and not second_pass.is_tile():
            return self._results[func].popleft()
        return func(*args, **(kwargs or {}))
