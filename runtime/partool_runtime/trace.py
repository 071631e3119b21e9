"""``python -m partool_runtime.trace`` lists the tensors that autograd saves for a block, and for final norm and head.

Nothing is computed and no memory is allocated: the runtime's own modules run on fake tensors. Each tensor that is
alive after a forward pass (or that a compiled block passes to its backward pass) is expressed by its size as a
multiple of one of the model's widths per token, so that one trace holds for every size of a kind of model. The planner
reads the result from ``partool/work/traced.json``, so that a plan does not depend on whether torch is installed.

    python -m partool_runtime.trace                 every kind of model, as shipped with partool
    python -m partool_runtime.trace FILE.json       one model at its own widths; the file (for ``-``, standard input)
                                                    holds {"model": {...}, "precision": "bf16", "compile": ["block"]};
                                                    without ``compile``, compiled and uncompiled blocks
                                                    are traced; ``fused`` maps either kind to the parts that
                                                    partool's kernels compute

The output is JSON. ``families`` maps a kind of model to a list: first the bytes per token and width, in the order of
``widths``, then the bytes per layer and micro-batch. Layers whose attention is limited to a window, or to the row of a
grid, save as many bytes as layers that attend to all earlier tokens.
"""

from __future__ import annotations

import datetime
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from partool.layout.traced import COEFFICIENTS, LATENT_WIDTHS, WIDTHS, applicable, family, head_family
from partool.spec.model import Activation, Mla, ModelConfig, Norm, Position
from partool.spec.parallel import Compile, Recompute
from partool.spec.training import Fused, Precision
from partool_runtime.fused import Fusing, put
from partool_runtime.model import Decoder, loss
from partool_runtime.model.attention import Context
from partool_runtime.parallel.recompute import recompute
from partool_runtime.precision import COMPUTE_DTYPE
from partool_runtime.torch_internals.tensors import FakeTensorMode, TorchDispatchMode

BATCH, LENGTH = 2, 96
TOKENS = BATCH * LENGTH
SIZES: dict[str, Any] = {
    "layers": 2, "hidden": 3072, "ffn_hidden": 8192, "heads": 20, "kv_heads": 4, "head_dim": 128, "vocab": 7000,
}  # fmt: skip
"""Sizes of the traced models; no two widths are equal, so that a tensor's size identifies its dimensions."""
LATENT_SIZES: dict[str, Any] = SIZES | {"kv_heads": 20, "head_dim": 192}
"""Sizes of the traced models with latent attention."""

Storages = Counter[tuple[int, int]]
"""Number of storages for each (number of elements, bytes of an element)."""


class TraceCase(NamedTuple):
    """The model and the options that are traced."""

    model: ModelConfig
    precision: Precision
    compile: Compile
    policy: Recompute
    fused: tuple[Fused, ...] = ()
    """Parts that partool's kernels compute."""


class UnknownTensorError(Exception):
    """Error for a tensor whose size is not a multiple of any width of the model."""


class _Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every storage that an operator creates while this mode is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[StorageWeakRef, tuple[int, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {_key(tensor) for tensor in _tensors((args, kwargs or {}))}
        for tensor in _tensors(out):
            if _key(tensor) not in inputs:
                self._made[_key(tensor)] = (tensor.untyped_storage().nbytes() // tensor.itemsize, tensor.itemsize)
        return out

    def storages(self, without: torch.Tensor) -> Storages:
        """Return the number of storages of each size that are still alive, except the storage of ``without``."""
        mine = _key(without)
        alive = ((key, size) for key, size in self._made.items() if not key.expired())  # type: ignore[no-untyped-call]
        return Counter(size for key, size in alive if key != mine)


class _Handed:
    """Records every storage that autograd saves, including storages that a compiled block saves."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self._inputs = {_key(tensor) for tensor in inputs}
        self._kept: dict[StorageWeakRef, torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if _key(tensor) not in self._inputs:
            self._kept[_key(tensor)] = tensor
        return tensor

    def storages(self) -> Storages:
        """Return the number of recorded storages of each size."""
        return Counter((t.untyped_storage().nbytes() // t.itemsize, t.itemsize) for t in self._kept.values())


def _key(tensor: torch.Tensor) -> StorageWeakRef:
    """Return a weak reference to a tensor's storage; two references are equal if they refer to the same storage."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from itertools.chain.from_iterable(_tensors(item) for item in value.values())
    elif isinstance(value, list | tuple):
        yield from itertools.chain.from_iterable(_tensors(item) for item in value)


def block_storages(case: TraceCase) -> Storages:
    """Return the number of storages of each size that one block saves: two blocks' number minus one block's."""
    one, two = (_chain(case, count) for count in (1, 2))
    return two - one


def _chain(case: TraceCase, count: int) -> Storages:
    model, context = _built(case)
    blocks = model.layers[:count]
    x_BSH = torch.empty(BATCH, LENGTH, case.model.hidden, dtype=COMPUTE_DTYPE[case.precision], requires_grad=True)
    if case.compile == "none":
        alive = _Alive()
        with alive:
            for block in blocks:
                x_BSH = block(x_BSH, context)
        return alive.storages(x_BSH)
    handed = _Handed([*model.parameters(), *(context.rope or ()), x_BSH])
    with saved_tensors_hooks(handed, lambda tensor: tensor):
        for block in blocks:
            x_BSH = block(x_BSH, context)
    return handed.storages()


def _built(case: TraceCase) -> tuple[Decoder, Context]:
    dtype = COMPUTE_DTYPE[case.precision]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = Decoder(case.model.model_copy(update={"layers": 2, "layer_types": case.model.layer_types[:1] * 2}))
    finally:
        torch.set_default_dtype(before)
    put(model, Fusing(case.fused, case.model))
    recompute(model.layers, [case.policy] * 2)
    if case.compile == "block":
        torch.compiler.reset()
        for block in model.layers:
            compiled = torch.compile(block.forward, backend="aot_eager_decomp_partition")
            setattr(block, "forward", compiled)  # noqa: B010 - mypy forbids assigning a method
    x_BSH = torch.empty(1, LENGTH, 1, dtype=dtype)
    return model, model.contexts(x_BSH, model.contexts.tokens(LENGTH, x_BSH.device))


def head_storages(case: TraceCase) -> Storages:
    """Return the number of storages of each size that final norm, head and loss save in addition to their input."""
    model, _ = _built(case)
    x_BSH = torch.empty(BATCH, LENGTH, case.model.hidden, dtype=COMPUTE_DTYPE[case.precision], requires_grad=True)
    labels_BS = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    weight_VH = model.embed.weight if model.head is None else model.head.weight
    alive = _Alive()
    with alive:
        total = loss(model.final_norm(x_BSH), weight_VH, labels_BS)
    return alive.storages(total)


def coefficients(storages: Storages, model: ModelConfig) -> list[int]:
    """Return the bytes of the storages, one number for each entry of :data:`partool.layout.traced.COEFFICIENTS`.

    Raises :class:`UnknownTensorError` for a tensor whose size is not a multiple of any width.
    """
    sizes = {
        "hidden": model.hidden,
        "query": model.heads * model.head_dim,
        "key": model.kv_heads * model.head_dim,
        "inner": model.ffn_hidden,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "scores": model.heads * LENGTH,
        "vocab": model.vocab,
        "one": 1,
    } | _latent_sizes(model)
    names = {TOKENS * sizes[name]: name for name in reversed(WIDTHS)}
    names.pop(0, None)
    result = dict.fromkeys(COEFFICIENTS, 0)
    for (elements, item), count in storages.items():
        if elements == 0:
            continue
        name = names.get(elements)
        if name is not None:
            result[name] += count * item
        elif elements < 2 * TOKENS * 20 and elements % TOKENS:
            result["layer"] += count * item * elements
        else:
            raise UnknownTensorError(f"a tensor of {elements} elements of {item} bytes is no multiple of a width")
    return list(result.values())


def _latent_sizes(model: ModelConfig) -> dict[str, int]:
    mla = model.mla
    if mla is None:
        return dict.fromkeys(LATENT_WIDTHS, 0)
    return {
        "value": model.heads * mla.v_head_dim,
        "expanded": model.heads * (mla.nope_head_dim + mla.v_head_dim),
        "q_rank": mla.q_rank or 0,
        "kv_rank": mla.kv_rank,
        "latent": mla.kv_rank + mla.rope_head_dim,
        "rotary": mla.rope_head_dim,
    }


def trace(cases: Iterable[TraceCase]) -> dict[str, list[int]]:
    """Return :func:`coefficients` of blocks and heads, by family (kind of model with its options and precision)."""
    table: dict[str, list[int]] = {}
    with FakeTensorMode():
        for case in cases:
            key = family(case.model, case.precision, case.compile, case.policy, case.fused)
            table[key] = coefficients(block_storages(case), case.model)
            head = head_family(case.model, case.precision)
            if head not in table and not case.fused:
                table[head] = coefficients(head_storages(case), case.model)
    return table


def shipped_cases() -> Iterator[TraceCase]:
    """Yield the cases of every kind of model that the runtime runs; latent attention as published models have it."""
    positions: tuple[Position, ...] = ("rope", "none")
    kinds = itertools.product(get_args(Norm), get_args(Activation), positions, (False, True))
    for norm, activation, position, qk_norm in kinds:
        yield from _shipped(ModelConfig(**SIZES, norm=norm, activation=activation, position=position, qk_norm=qk_norm))
    for q_rank in (None, 1472):
        mla = Mla(q_rank=q_rank, kv_rank=448, nope_head_dim=128, rope_head_dim=64, v_head_dim=112)
        yield from _shipped(ModelConfig(**LATENT_SIZES, mla=mla))


def _shipped(config: ModelConfig) -> Iterator[TraceCase]:
    for compile, policy in itertools.product(get_args(Compile), get_args(Recompute)):
        yield TraceCase(config, "bf16", compile, policy)
        yield TraceCase(config, "fp32", compile, policy)
        if compile == "none":
            # Compilers fuse operations inside of blocks by themselves.
            yield TraceCase(config, "bf16", compile, policy, applicable(config))
            yield TraceCase(config, "fp32", compile, policy, applicable(config))


def model_cases(
    model: ModelConfig,
    precision: Precision,
    compiles: Sequence[Compile],
    fused: Mapping[str, Sequence[Fused]] = MappingProxyType({}),
) -> Iterator[TraceCase]:
    """Yield a case per kind of compilation and recomputation policy.

    ``fused`` maps a kind of compilation to the parts of a model that partool's kernels compute.
    """
    config = model.model_copy(update={"layers": 2, "layer_types": (), "window": None, "grid": None})
    for compile, policy in itertools.product(compiles, get_args(Recompute)):
        yield TraceCase(config, precision, compile, policy, tuple(fused.get(compile, ())))


def main(arguments: Sequence[str]) -> int:
    """Trace and print JSON; returns the exit code."""
    if arguments:
        text = sys.stdin.read() if arguments[0] == "-" else Path(arguments[0]).read_text("utf-8")
        wanted = json.loads(text)
        model = ModelConfig.model_validate_json(json.dumps(wanted["model"]))
        cases = model_cases(
            model, wanted["precision"], wanted.get("compile", get_args(Compile)), wanted.get("fused", {})
        )
    else:
        cases = shipped_cases()
    table = trace(cases)
    head = {"torch": torch.__version__, "date": datetime.date.today().isoformat(), "coefficients": list(COEFFICIENTS)}
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(table[key])}" for key in sorted(table))
    print(json.dumps(head)[:-1] + ', "families": {\n' + lines + "\n}}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
