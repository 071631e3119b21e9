"""Models that transformers builds: the plan's record of a model, and the layouts that the model rules out."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from partool.catalog.models import module_model
from partool.catalog.transformers_process import DescriptionError, describe_graph
from partool.diagnostics.record import Diagnostic
from partool.layout.parameters import count, parameters
from partool.plan.types import HfModel, ModuleModel
from partool.planner.described import Description, FoundAttention
from partool.planner.problem import Problem
from partool.spec.sequence_checks import methods_of
from partool.spec.spec import Spec
from partool.spec.watched import watching
from partool.strategies.schedules import MOVING_WEIGHTS
from partool.strategies.sequence import BY_GRAPH, WHOLE_SEQUENCES

_TENSOR = ("parallel", "tensor")
_FAR = 0.01
"""A warning is given if the number of parameters used for predictions is wrong by more than this share."""


def hf_model(spec: Spec, described: Description | None, base_dir: Path) -> HfModel | None:
    """Return the plan's record of a model that transformers builds; None for partool's own decoder."""
    if described is None or spec.model.hf is None:
        return None
    structure = described.structure
    path = (base_dir / spec.model.hf).absolute()
    return HfModel(
        path=str(path),
        model_type=structure.model_type,
        architecture=structure.architecture,
        code_hash=described.code_hash,
    )


def module_record(spec: Spec, described: Description | None, base_dir: Path) -> ModuleModel | None:
    """Return the plan's record of a module of the user's own; None for other models."""
    if spec.model.module is None or described is None:
        return None
    return ModuleModel.model_validate(module_model(spec.model, base_dir) | {"files": described.code_files})


def unused_weights(spec: Spec, base_dir: Path) -> Iterator[Diagnostic]:
    """Warn of weight files in the model's folder that go unused because the spec sets no ``weights.source``."""
    folder, weights = base_dir / (spec.model.hf or ""), spec.model.weights
    if spec.model.hf is None or "source" in weights.model_fields_set or not any(folder.glob("*.safetensors")):
        return
    message = f"{folder} holds weights, but the first weights are drawn from the seed"
    help = "write weights: {source: hf} to go on from them, or {source: init}"
    yield Diagnostic("PT447", message, "warning", ("model", "hf"), help=help)


def with_graph(spec: Spec, described: Description, base_dir: Path) -> Description:
    """Return the description with what its graph shows, if the spec may share sequences through the graph."""
    sequence = spec.parallel.sequence
    may_need_graph = sequence.method in BY_GRAPH or (sequence.method == "auto" and bool(described.attention_problem))
    if sequence.degree == 1 or not may_need_graph or spec.model.hf is None or watching():
        return described  # a stand-in for the method must not start what takes seconds
    try:
        graph = describe_graph(base_dir / spec.model.hf, spec.training.sequence_length)
    except DescriptionError as error:
        graph = {"problem": str(error), "attention": []}
    return described.model_copy(
        update={
            "graph_problem": graph["problem"],
            "graph_attention": tuple(FoundAttention.model_validate(each) for each in graph["attention"]),
        }
    )


def narrowed(spec: Spec, described: Description) -> Spec:
    """Return the spec with ``auto`` replaced in each field for which the model allows only one value.

    Blocks are not compiled, and norms do not work on shares of the sequence. The number of stages or of sequence ranks
    is 1 if the model cannot be cut into stages or along the sequence.
    """
    changes: dict[str, Any] = {}
    parallel = spec.parallel
    if parallel.compile == "auto":
        changes["compile"] = "none"
    if parallel.tensor.sequence_norms == "auto":
        changes["tensor"] = parallel.tensor.model_copy(update={"sequence_norms": False})
    if described.pipeline_problem and parallel.pipeline.stages == "auto":
        changes["pipeline"] = parallel.pipeline.model_copy(update={"stages": 1})
    if described.is_module and parallel.tensor.degree == "auto":
        changes["tensor"] = parallel.tensor.model_copy(update={"sequence_norms": False, "degree": 1})
    nothing_shares = described.attention_problem and described.graph_problem != ""
    if nothing_shares and parallel.sequence.degree == "auto":
        changes["sequence"] = parallel.sequence.model_copy(update={"degree": 1})
    return spec.model_copy(update={"parallel": parallel.model_copy(update=changes)})


def check_hf(problem: Problem) -> Iterator[Diagnostic]:
    """Yield findings about settings of the spec that a model built by transformers cannot satisfy."""
    described = problem.described
    if described is None:
        return
    name = described.structure.architecture
    if described.head_problem:
        help = "partool computes the loss without holding all logits; choose a model whose logits are one product"
        yield Diagnostic("PT452", f"{name}: {described.head_problem}", path=("model", "hf"), help=help)
    stages = problem.pinned_degrees.get("pipeline.stages", 1)
    if described.pipeline_problem and stages > 1:
        message = f"{name} cannot be cut into {stages} pipeline stages: {described.pipeline_problem}"
        yield Diagnostic("PT453", message, path=("parallel", "pipeline"), help="use stages: 1, and tensor or zero: 3")
    yield from _unfit(problem, name)
    yield from _attention(problem, described, name)
    if described.auxiliary_loss:
        message = f"{name}: the loss that balances experts (output_router_logits) is left out of training"
        yield Diagnostic("PT451", message, "warning", ("model", "hf"), help="set output_router_logits: false")
    elements = sum(prod(shape) for shape in described.structure.shapes().values())
    priced = count(parameters(problem.model))
    if abs(priced - elements) > _FAR * elements:
        message = f"{name} has {elements:,} parameters; memory and time are those of {priced:,}"
        help = "predictions are of the nearest model that partool knows, and may be off by that share"
        yield Diagnostic("PT451", message, "warning", ("model", "hf"), help=help)


def _attention(problem: Problem, described: Description, name: str) -> Iterator[Diagnostic]:
    """If the model's attention cannot be replaced, yield findings about settings that need partool's attention."""
    sequence, data = problem.spec.parallel.sequence, problem.spec.data
    shared = sequence.degree != 1
    why, allowed_methods = described.attention_problem, methods_of(sequence)
    if shared and sequence.method in BY_GRAPH and described.graph_problem:
        help = "use sequence: 1, and tensor or zero: 3" + ("" if why else ", or method: ulysses")
        message = f"{name} cannot be sharded as a graph: {described.graph_problem}"
        yield Diagnostic("PT448", message, path=("parallel", "sequence", "method"), help=help)
    elif why and shared and (described.graph_problem or not set(allowed_methods) & set(BY_GRAPH)):
        why_not = f"; as a graph neither: {described.graph_problem}" if described.graph_problem else ""
        help = "use sequence: 1, and tensor or zero: 3, or a model whose attention transformers registers"
        if not described.graph_problem:
            help = "use method: compiled, which shares sequences through the graph of the model, or sequence: 1"
        message = f"{name} cannot share sequences between ranks: {why}{why_not}"
        yield Diagnostic("PT483", message, path=("parallel", "sequence"), help=help)
    by_graph = sequence.method in BY_GRAPH and shared and sequence.degree != "auto"
    if why and data.attend == "document" and not by_graph:
        message = f"{name} cannot mask attention between documents: {why}"
        yield Diagnostic("PT483", message, path=("data", "attend"), help="use attend: sequence")
    whole_sequence_methods = set(allowed_methods) & set(WHOLE_SEQUENCES)
    if (
        not why
        and shared
        and allowed_methods
        and not whole_sequence_methods
        and (lost := described.method_problem(allowed_methods[0]))
    ):
        message = f"{name} drops {described.attention_dropout:g} of its attention weights, and {lost}"
        help = "use method: ulysses, which sees whole sequences, or set attn_pdrop or attention_dropout to 0"
        yield Diagnostic("PT484", message, path=("parallel", "sequence", "method"), help=help)


def _unfit(problem: Problem, name: str) -> Iterator[Diagnostic]:
    """Yield findings about settings of the spec that only partool's own decoder supports."""
    parallel = problem.spec.parallel
    schedule = parallel.pipeline.schedule
    help = "which knows partool's own decoder only; drop it, or write model.config in place of model.hf"
    wrong = (
        (parallel.compile == "block", ("parallel", "compile"), "compile: block"),
        (parallel.tensor.sequence_norms is True, (*_TENSOR, "sequence_norms"), "sequence_norms"),
        (_inner(problem) > 1, (*_TENSOR, "shape"), "two-dimensional tensor parallelism"),
        (parallel.tensor.overlap == "symmetric", (*_TENSOR, "overlap"), "overlap: symmetric"),
        (
            schedule in MOVING_WEIGHTS,
            ("parallel", "pipeline", "schedule"),
            f"schedule: {schedule}",
        ),
    )
    for broken, path, what in wrong:
        if broken:
            yield Diagnostic("PT454", f"{name} is built by transformers and cannot have {what}", path=path, help=help)
    if problem.described is not None and problem.described.is_module:
        yield from _unfit_module(problem, name)


def _unfit_module(problem: Problem, name: str) -> Iterator[Diagnostic]:
    """Yield findings about settings that a module of the user's own cannot have."""
    spec, tensor = problem.spec, problem.tensor_degree
    wrong = (
        (tensor not in ("auto", 1), _TENSOR, "tensor parallelism"),
        (bool(spec.training.adversarial.epsilon), ("training", "adversarial"), "perturbed embeddings"),
        (spec.training.precision == "fp8", ("training", "precision"), "products in fp8"),
        (spec.engine != "partool", ("engine",), f"engine: {spec.engine}"),
    )
    for broken, path, what in wrong:
        if broken:
            help = "drop it; partool runs the module's code as it is"
            yield Diagnostic("PT454", f"{name} is a module of yours and cannot have {what}", path=path, help=help)


def _inner(problem: Problem) -> int:
    shape = problem.spec.parallel.tensor.shape
    return 1 if shape == "auto" else shape[1]
