"""The memory term of a tensor and the module that runs, by the code that creates it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, cast

import torch

from partool_runtime.torch_internals.fake import CALL_OF_MODULE, current_node, in_backward

ELSEWHERE = "elsewhere"
"""Of tensors that a real run keeps in files: they take no memory."""
_BY_CODE: tuple[tuple[str, str, str], ...] = (
    ("/torch/distributed/fsdp/_fully_shard/_fsdp_param.py", "init_all_gather_outputs", "gathered"),
    ("/torch/distributed/fsdp/_fully_shard/_fsdp_param.py", "init_unsharded_param", "gathered"),
    ("/torch/distributed/fsdp/_fully_shard/_fsdp_param.py", "all_gather_inputs", "communication"),
    ("/torch/distributed/fsdp/_fully_shard/_fsdp_param.py", "to_accumulated_grad_if_needed", "gradients"),
    ("/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "", "communication"),
    ("/partool_runtime/torch_internals/group_gather.py", "", "communication"),
    ("/partool_runtime/parallel/pipeline/wires.py", "", "communication"),
    ("/partool_runtime/parallel/weipipe/shifts.py", "", "communication"),
    ("/partool_runtime/parallel/weipipe/passes.py", "__init__", "gathered"),
    ("/partool_runtime/model/loss.py", "", "loss"),
    ("/partool_runtime/model/distillation.py", "", "loss"),
    ("/partool_runtime/parallel/tensor/distillation.py", "", "loss"),
    ("/partool_runtime/parallel/tensor/vocabulary.py", "looked_up", "activations"),
    ("/partool_runtime/parallel/tensor/vocabulary.py", "vocabulary_rows", "activations"),
    ("/partool_runtime/parallel/tensor/vocabulary.py", "", "loss"),
    ("/partool_kernels/cross_entropy/", "", "loss"),
    ("/partool_kernels/linear_cross_entropy/", "", "loss"),
    ("/partool_runtime/optim/muon.py", "orthogonalised", "optimizer"),
    ("/partool_runtime/optim/muon.py", "", "communication"),
    ("/partool_runtime/optim/lamb.py", "", "communication"),
    ("/partool_runtime/offload/resident.py", "arrive", "gradients"),
    ("/partool_runtime/optim/average.py", "", "average"),
    ("/partool_runtime/optim/", "", "optimizer"),
    ("/partool_runtime/weights/", "", "parameters"),
    ("/partool_runtime/dry/host.py", "_no_state_file", ELSEWHERE),
    ("/partool_runtime/dry/host.py", "_no_shard_file", ELSEWHERE),
)
"""(part of a file's path, name of a function or nothing, memory term); of the calls on the stack the innermost one that
appears here decides."""
_TERM = "partool memory term"
"""Key of a node's metadata: the term of what the node makes in the backward pass."""
_DEPTH = 24
"""Number of calls on the stack that are looked at, but for those of functions that repeat layers."""
_REPEATING = "/partool_runtime/dry/layer"
"""Part of the paths of files whose functions stand between a layer and its code, in some passes and not in others."""
_KNOWN: dict[CodeType, tuple[str, int]] = {}
"""Term of a function's tensors, and how much a call of it counts."""


def loss_known(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a loss function of the hidden state and more, whose backward pass :func:`caller` knows as the loss's.

    Autograd runs operators without the code that called them forward, so that their nodes carry the term.
    """

    def marked_loss(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        total = loss(hidden, *args, **kwargs)
        ahead: list[Any] = [total.grad_fn]
        while ahead:
            node = ahead.pop()
            if node is not None and node is not hidden.grad_fn and _TERM not in _metadata(node):
                _metadata(node)[_TERM] = "loss"
                ahead.extend(following for following, _ in node.next_functions)
        return total

    return marked_loss


def caller(otherwise: str, names: Mapping[int, str]) -> tuple[str, str]:
    """Return the memory term of a tensor that the code above on the stack creates, and the module.

    A tensor of no code in the table is of the term ``otherwise``; in a backward pass it is of the loss or ``working``.
    ``names`` are the modules' names by their ``id``. The module is empty where none runs, as in most of a backward
    pass.
    """
    frame, term, module = sys._getframe(2), "", ""
    looked = 0
    while looked < _DEPTH:
        code = frame.f_code
        code_facts = _KNOWN.get(code) or _KNOWN.setdefault(code, _facts_of(code))
        looked += code_facts[1]
        term = term or code_facts[0]
        if not module and code is CALL_OF_MODULE:
            module = names.get(id(frame.f_locals["self"]), "")
        if (term and module) or frame.f_back is None:
            break
        frame = frame.f_back
    return term or (_of_node() if in_backward() else otherwise), module


def _of_node() -> str:
    node = current_node()
    return "working" if node is None else _metadata(node).get(_TERM, "working")


def _metadata(node: Any) -> dict[str, str]:
    return cast("dict[str, str]", node.metadata)


def _facts_of(code: CodeType) -> tuple[str, int]:
    path = code.co_filename.replace("\\", "/")
    term = next((term for part, name, term in _BY_CODE if part in path and name in ("", code.co_name)), "")
    return term, int(_REPEATING not in path)
