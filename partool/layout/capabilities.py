"""Features that the runtime supports, each with its parity test, and features that it does not support yet.

A plan is described by aspects (``zero 3``, ``precision bf16``, ``activation swiglu``). An aspect that the table lacks
makes the plan ``runnable: false`` with a rule code; the plan is still priced and printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from partool.spec.model import Activation, ModelConfig
from partool.strategies.schedules import SCHEDULES
from partool.strategies.sequence import METHODS

_ZERO = "tests/parity/test_zero.py"
_MODEL = "tests/unit/runtime/model/test_runtime_model.py"


GATHERS = ("sequential gathers", "other prefetch", "persistent parameters", "leaves")
"""Aspects that stand for non-default ways to all-gather parameters under ZeRO."""


GRAPH_ALONE = "a captured graph beside others"
"""Aspect of layouts that would change modules which a captured graph no longer calls."""


@dataclass(frozen=True, slots=True)
class Capability:
    """An aspect of a plan (such as ``zero 3``) that the runtime supports."""

    aspect: str
    parity_test: str
    """``path::function`` of the test that compares the aspect with a single process or a reference implementation."""


@dataclass(frozen=True, slots=True)
class Gap:
    """An aspect that can be planned but not run yet."""

    code: str
    """Rule code, PT4xx."""
    what: str
    path: tuple[str, ...]
    """Field of the spec that requests the aspect."""


def of_model(model: ModelConfig) -> Iterator[str]:
    """Yield the aspects that the runtime must support to run a model with partool's own decoder."""
    yield f"norm {model.norm}"
    yield f"activation {model.activation}"
    yield f"position {model.position}"
    yield from (f"attention {kind}" for kind in sorted(set(model.layer_types) or {"full"}))
    wanted = {
        "tied embeddings": model.tied_embeddings,
        "grouped queries": model.kv_heads != model.heads,
        "norms of queries and keys": model.qk_norm,
        "biases": model.qkv_bias or model.out_bias or model.ffn_bias,
        "scaled rope": model.rope_scaling is not None,
        "sinks": model.sinks,
        "biases of experts": model.moe is not None and model.moe.bias,
        "moe": model.moe is not None,
        "mla": model.mla is not None,
        "predictions": model.predictions > 0,
    }
    yield from (aspect for aspect, applies in wanted.items() if applies)


_LAYERS = f"{_MODEL}::test_decoder_is_the_reference"
_STAGES = f"{_ZERO}::test_two_ranks_equal_one_process"
_LOSSES = f"{_ZERO}::test_losses_of_lower_precision_are_near"
_RECOMPUTE = f"{_ZERO}::test_recomputation_changes_nothing"
_OFFLOAD = "tests/parity/test_offload.py"
_TILES = "tests/parity/test_tiles.py"
_PIPELINE = "tests/parity/test_pipeline_trainer.py"
_PIPELINES = f"{_PIPELINE}::test_training_through_a_pipeline_equals_one_process"
_EXPERTS = "tests/parity/test_experts.py"
_TENSOR_TRAINER = "tests/parity/test_tensor_trainer.py::test_training_on_tensor_ranks_equals_one_process"
_TENSOR = "tests/parity/test_tensor.py::test_passes_equal_one_process"

CAPABILITIES: tuple[Capability, ...] = (
    Capability("backend cpu", _STAGES),
    Capability("backend cuda", "tests/parity/test_cuda.py::test_one_device_equals_the_cpu"),
    # torch uses the name "cuda" for AMD devices too: the same code and the same test run on both.
    Capability("backend rocm", "tests/parity/test_cuda.py::test_one_device_equals_the_cpu"),
    Capability("one node", f"{_ZERO}::test_three_ranks_equal_one_process"),
    Capability("several nodes", "tests/parity/test_several_nodes.py::test_two_nodes_equal_one_process"),
    *(Capability(f"zero {stage}", _STAGES) for stage in range(4)),
    Capability("hybrid sharding", f"{_ZERO}::test_hybrid_sharding_equals_one_process"),
    *(Capability(name, "tests/parity/test_zero_controls_ranks.py::test_equals_one_process") for name in GATHERS),
    Capability("accumulation", _STAGES),
    Capability("frozen parameters", f"{_ZERO}::test_frozen_parameters_stay_and_have_no_moments"),
    Capability("adapter", "tests/parity/test_adapters.py::test_training_equals_one_process"),
    Capability(
        "adapter of a model of transformers", "tests/parity/test_adapters_hf.py::test_training_equals_one_process"
    ),
    Capability("tied embeddings", f"{_ZERO}::test_tied_embeddings"),
    Capability("precision fp64", _STAGES),
    Capability("precision fp32", "tests/parity/test_trainer.py::test_low_precision_stays_near_fp32"),
    Capability("precision bf16", _LOSSES),
    Capability("precision fp16", _LOSSES),
    Capability("precision fp8", "tests/parity/test_fp8.py::test_losses_are_near_those_of_bf16"),
    Capability("compile none", _STAGES),
    Capability("compile block", f"{_ZERO}::test_compiled_blocks_equal_one_process"),
    Capability("recompute none", _STAGES),
    Capability("recompute attention", _RECOMPUTE),
    Capability("recompute selective", _RECOMPUTE),
    Capability("recompute full", _RECOMPUTE),
    Capability("recompute keep_attention", f"{_TILES}::test_keep_attention_changes_nothing"),
    Capability("tiles of networks", f"{_TILES}::test_training_in_tiles_equals_one_process"),
    Capability("tiles of the loss", f"{_TILES}::test_training_in_tiles_equals_one_process"),
    *(
        Capability(name, f"{_OFFLOAD}::test_steps_are_those_without_offload")
        for name in ("offload", "offload of the optimizer alone", "offload to disks")
    ),
    *(
        Capability(name, f"{_OFFLOAD}::test_parameters_on_the_host")
        for name in ("offload of parameters", "offload of parameters to disks")
    ),
    Capability("offload of activations", "tests/parity/test_cuda.py::test_activations_in_host_memory_change_nothing"),
    *(Capability(f"schedule {name}", record.parity) for name, record in SCHEDULES.items()),
    Capability("schedule file", _PIPELINES),
    Capability("tensor", _TENSOR),
    Capability("norms on shares of the sequence", _TENSOR),
    Capability(
        "tensor in two dimensions",
        "tests/parity/test_atp.py::test_every_shape_arrangement_and_combination_equals_one_process",
    ),
    Capability("tensor in a pipeline", _TENSOR_TRAINER),
    Capability("zero 0 on sequence ranks", next(iter(METHODS.values())).parity),
    Capability("zero 0 beside tensor ranks", _TENSOR_TRAINER),
    Capability("zero 2 or 3 in a pipeline", _PIPELINES),
    Capability("zero 3 on tensor ranks", _TENSOR_TRAINER),
    Capability("tensor ranks that share sequences", next(iter(METHODS.values())).parity),
    Capability("continued prompts", "tests/parity/test_validation_sets.py::test_every_layout_continues_prompts_alike"),
    Capability("preferences", "tests/parity/test_preferences.py::test_every_layout_equals_one_process"),
    Capability("teacher", "tests/parity/test_distill.py::test_every_layout_equals_plain_torch"),
    Capability("moving average", "tests/parity/test_average.py::test_every_layout_equals_one_process"),
    Capability("predictions", "tests/parity/test_multi_token.py::test_training_equals_the_reference"),
    Capability("moe", f"{_EXPERTS}::test_training_equals_one_process"),
    Capability("biases of experts", f"{_EXPERTS}::test_training_equals_one_process"),
    Capability("expert", f"{_EXPERTS}::test_training_equals_one_process"),
    Capability("parts of experts", f"{_EXPERTS}::test_training_equals_one_process"),
    Capability("node-first exchange of experts", f"{_EXPERTS}::test_training_equals_one_process"),
    Capability("padded exchange of experts", f"{_EXPERTS}::test_training_equals_one_process"),
    *(Capability(f"sequence {name}", record.parity) for name, record in METHODS.items()),
    Capability(
        "shared sequences of a model of transformers",
        "tests/parity/test_sequence_hf.py::test_models_on_shares_equal_one_process",
    ),
    *(Capability(f"norm {name}", _LAYERS) for name in ("rmsnorm", "layernorm")),
    *(Capability(f"activation {name}", _LAYERS) for name in get_args(Activation)),
    *(Capability(f"position {name}", _LAYERS) for name in ("rope", "learned", "none")),
    *(Capability(f"attention {name}", _LAYERS) for name in ("full", "sliding", "row", "column")),
    Capability("model of transformers", "tests/parity/test_tensor_hf.py::test_models_equal_those_of_transformers"),
    *(
        Capability(name, _LAYERS)
        for name in ("grouped queries", "norms of queries and keys", "biases", "scaled rope", "mla", "sinks")
    ),
)

_PRECISION, _OPTIMIZER, _EMA = ("training", "precision"), ("optimizer", "name"), ("training", "ema")
_PREDICTIONS = ("model", "multi_token")
_PROMPTS = ("training", "validation", "prompts")

GAPS: dict[str, Gap] = {
    "tensor with fused collectives": Gap(
        "PT401", "tensor parallelism through symmetric memory", ("parallel", "tensor", "overlap")
    ),
    "experts with weights that travel": Gap("PT405", "experts with WeiPipe's weights", ("parallel", "pipeline")),
    "experts along a grid": Gap("PT405", "experts with sequence method dsp", ("parallel", "sequence")),
    "experts in fp8": Gap("PT405", "experts in fp8", _PRECISION),
    GRAPH_ALONE: Gap(
        "PT449",
        "a model's graph on tensor ranks, in stages, compiled, in tiles, in fp8 or with leaves",
        ("parallel", "sequence", "method"),
    ),
    "adapter in fp8": Gap("PT406", "adapters beside products in fp8", _PRECISION),
    "adapter with an optimizer of whole matrices": Gap("PT406", "adapters with muon", _OPTIMIZER),
    "adapter with exchanges of one bit": Gap("PT406", "adapters with exchanges of one bit", _OPTIMIZER),
    "adapter with weights that travel": Gap("PT406", "adapters with WeiPipe's weights", ("parallel", "pipeline")),
    "adapter on tensor ranks in two dimensions": Gap(
        "PT406", "adapters on two-dimensional tensor ranks", ("parallel", "tensor", "shape")
    ),
    "adapter on parts of experts": Gap(
        "PT406", "adapters of experts whose widths ranks share", ("parallel", "expert_tensor")
    ),
    # In models of transformers torch's generator draws the masks: layers are not given the numbers of their tokens.
    "dropout of an adapter of transformers in tiles": Gap(
        "PT406", "dropout of adapters of a model of transformers in tiles", ("parallel", "tiles", "mlp")
    ),
    "dropout of an adapter of transformers on tensor ranks": Gap(
        "PT406", "dropout of adapters of a model of transformers on tensor ranks", ("parallel", "tensor")
    ),
    "dropout of an adapter along a grid": Gap(
        "PT406", "dropout of adapters with sequence method dsp", ("parallel", "sequence", "method")
    ),
    "adapter in a captured graph": Gap(
        "PT406", "adapters in a graph that ranks share", ("parallel", "sequence", "method")
    ),
    "fp8 on other architectures": Gap(
        "PT489", "products in fp8 on devices that no kernels are compiled for", _PRECISION
    ),
    "fp8 on tensor ranks in two dimensions": Gap(
        "PT489", "products in fp8 on two-dimensional tensor ranks", _PRECISION
    ),
    "fp8 on tensor ranks of a model of transformers": Gap(
        "PT489", "products in fp8 on tensor ranks of a model of transformers", _PRECISION
    ),
    "preferences with weights that travel": Gap(
        "PT420", "pairs of answers with WeiPipe's weights", ("training", "objective")
    ),
    "preferences on tensor ranks in two dimensions": Gap(
        "PT420", "pairs of answers on two-dimensional tensor ranks", ("training", "objective")
    ),
    "teacher on tensor ranks in two dimensions": Gap(
        "PT404", "a teacher on two-dimensional tensor ranks", ("training", "distill")
    ),
    "continued prompts with weights that travel": Gap("PT427", "prompts continued with WeiPipe's weights", _PROMPTS),
    "continued prompts on tensor ranks in two dimensions": Gap(
        "PT427", "prompts continued on two-dimensional tensor ranks", _PROMPTS
    ),
    "moving average beside offloaded state": Gap(
        "PT424", "a moving average of weights whose optimizer's state, or parameters, are off the device", _EMA
    ),
    "moving average with exchanges of one bit": Gap(
        "PT424", "a moving average of weights that differ between ranks, with exchanges of one bit", _EMA
    ),
    "predictions in a pipeline": Gap("PT439", "multi-token prediction in a pipeline", ("parallel", "pipeline")),
    "predictions on tensor ranks in two dimensions": Gap(
        "PT439", "multi-token prediction on two-dimensional tensor ranks", ("parallel", "tensor", "shape")
    ),
    "predictions along a grid": Gap(
        "PT439", "multi-token prediction with sequence method dsp", ("parallel", "sequence", "method")
    ),
    "predictions beside offloading": Gap(
        "PT439", "multi-token prediction beside offloaded states, parameters or activations", ("parallel", "offload")
    ),
    "predictions beside an adapter": Gap("PT439", "multi-token prediction beside an adapter", _PREDICTIONS),
    "predictions of pairs of answers": Gap("PT439", "multi-token prediction of pairs of answers", _PREDICTIONS),
    "predictions in fp8": Gap("PT439", "multi-token prediction in fp8", _PRECISION),
    "predictions with exchanges of one bit": Gap(
        "PT439", "multi-token prediction with exchanges of one bit", _OPTIMIZER
    ),
    "fp8 with weights that travel": Gap("PT489", "products in fp8 with WeiPipe's weights", _PRECISION),
}
"""Aspect → gap, for each aspect that cannot run yet. Every other aspect has a capability."""

_RUNS = frozenset(capability.aspect for capability in CAPABILITIES)


def runs(aspect: str) -> bool:
    """Return True if the runtime supports an aspect."""
    return aspect in _RUNS
