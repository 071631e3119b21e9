"""Checks of multi-token prediction."""

from __future__ import annotations

from collections.abc import Iterator

from partool.diagnostics.record import Diagnostic
from partool.planner.problem import Problem

_PATH, _WEIGHT = ("model", "multi_token"), ("training", "multi_token_weight")


def check(problem: Problem) -> Iterator[Diagnostic]:
    """Yield findings about a weight without effect, too short sequences, and what does not go with predictions."""
    training, depth = problem.spec.training, problem.model.predictions
    if not depth:
        if "multi_token_weight" in training.model_fields_set:
            message = "multi_token_weight weighs the losses of model.multi_token, which the model does not have"
            help = "write model.multi_token: {depth: 1}, or drop multi_token_weight"
            yield Diagnostic("PT677", message, path=_WEIGHT, help=help)
        return
    if training.sequence_length <= depth:
        message = f"depth: {depth} leaves no further token to predict in sequences of {training.sequence_length} tokens"
        help = f"use sequences of at least {depth + 1} tokens, or a smaller depth"
        yield Diagnostic("PT678", message, path=(*_PATH, "depth"), help=help)
    if training.adversarial.epsilon:
        message = "training.adversarial perturbs embeddings, which modules for further tokens read unperturbed"
        yield Diagnostic("PT439", message, path=_PATH, help="drop multi_token, or training.adversarial")
    if training.distill is not None:
        message = "training.distill teaches the model's next tokens, and modules for further tokens have no teacher"
        yield Diagnostic("PT439", message, path=_PATH, help="drop multi_token, or training.distill")
    if problem.model.moe is not None and problem.model.moe.layers:
        message = "model.moe.layers says nothing of the experts of modules for further tokens"
        yield Diagnostic("PT439", message, path=_PATH, help="drop multi_token, or model.moe.layers")
    if problem.spec.engine != "partool":
        message = f"plans for engine: {problem.spec.engine} cannot say multi_token"
        yield Diagnostic("PT439", message, path=_PATH, help="drop multi_token, or use engine: partool")
