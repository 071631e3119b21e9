"""Rules about forms of tensor parallelism and what goes with them (PT455 to PT459)."""

from __future__ import annotations

from partool.diagnostics.record import Rule

_MODEL = "model: {layers: 2, hidden: 64, heads: 4, vocab: 256}\n"
_FOUR_GPUS = "hardware: {accelerator: h100-sxm, per_node: 4}\ndata: python-stdlib\n"

RULES: tuple[Rule, ...] = (
    Rule(
        "PT455",
        "The shape of tensor parallelism is of another degree",
        "A shape [d1, d2] arranges the tensor-parallel ranks, so d1 · d2 is their number.",
        _MODEL + _FOUR_GPUS + "parallel: {tensor: {degree: 4, shape: [4, 2]}}\n",
        _MODEL + _FOUR_GPUS + "parallel: {tensor: {degree: 4, shape: [2, 2]}}\n",
    ),
    Rule(
        "PT456",
        "The model cannot be cut in two dimensions",
        "Two-dimensional tensor parallelism (ATP, arXiv 2301.08658) deals heads over all d1 · d2 ranks, inner widths "
        "over d1 and the hidden size over d2, the same to every rank.",
        "model: {layers: 2, hidden: 60, heads: 6, vocab: 256}\n"
        + _FOUR_GPUS
        + "parallel: {tensor: {degree: 4, shape: [2, 2]}}\n",
        _MODEL + _FOUR_GPUS + "parallel: {tensor: {degree: 4, shape: [2, 2]}}\n",
    ),
    Rule(
        "PT457",
        "Norms on shares of the sequence, where the hidden size is cut",
        "In two-dimensional tensor parallelism the residual stream lies over the inner ranks by its width; it cannot "
        "lie over the same ranks by tokens as well.",
        _MODEL + _FOUR_GPUS + "parallel: {tensor: {shape: [2, 2], sequence_norms: true}}\n",
        _MODEL + _FOUR_GPUS + "parallel: {tensor: {shape: [4, 1], sequence_norms: true}}\n",
    ),
    Rule(
        "PT458",
        "Fused collectives without symmetric memory",
        "overlap: symmetric computes products and collectives in one kernel over memory that the devices of a node "
        "map for each other, which PyTorch has for CUDA only.",
        _MODEL + "hardware: {accelerator: cpu, per_node: 2}\ndata: python-stdlib\n"
        "training: {precision: fp32}\nparallel: {tensor: {degree: 2, overlap: symmetric}}\n",
        _MODEL + "hardware: {accelerator: cpu, per_node: 2}\ndata: python-stdlib\n"
        "training: {precision: fp32}\nparallel: {tensor: {degree: 2, overlap: backward}}\n",
    ),
    Rule(
        "PT459",
        "Tensor parallelism in a pipeline whose weights travel",
        "WeiPipe's ranks work on micro-batches of their own with whole weights that go round; ranks that share every "
        "matrix would have to work on the same ones.",
        "model: {layers: 4, hidden: 64, heads: 4, vocab: 256}\n"
        + _FOUR_GPUS
        + "parallel: {tensor: 2, pipeline: {stages: 2, schedule: weipipe}}\n",
        "model: {layers: 4, hidden: 64, heads: 4, vocab: 256}\n"
        + _FOUR_GPUS
        + "parallel: {tensor: 2, pipeline: {stages: 2, schedule: 1f1b}}\n",
    ),
)
