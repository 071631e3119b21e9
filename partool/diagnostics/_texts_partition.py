"""Rules about how tensor-parallel ranks share a model's parameters (PT440 to PT446)."""

from __future__ import annotations

from partool.diagnostics.record import Rule

_MODEL = "model: {layers: 2, hidden: 64, heads: 4, vocab: 256}\n"
_TWO_GPUS = "hardware: {accelerator: h100-sxm, per_node: 2}\ndata: python-stdlib\n"
_FOUR_GPUS = "hardware: {accelerator: h100-sxm, per_node: 4}\ndata: python-stdlib\n"

RULES: tuple[Rule, ...] = (
    Rule(
        "PT440",
        "A pattern of tensor parallelism matches nothing",
        "A mistyped name would leave the parameter to the other rules, as if the pattern had not been written.",
        _MODEL + _TWO_GPUS + 'parallel: {tensor: {degree: 2, patterns: {"layers.*.mlp.up": column}}}\n',
        _MODEL + _TWO_GPUS + 'parallel: {tensor: {degree: 2, patterns: {"layers.*.ffn.up": column}}}\n',
    ),
    Rule(
        "PT441",
        "Cuts do not fit the model, or each other",
        "The output that one matrix leaves on a rank is the input of the next one there: matrices that read the hidden "
        "size are cut by column, those that write it by row, in the same parts, and every cut fits the widths.",
        'model: {hf: ./llama}\nparallel: {tensor: {degree: 2, patterns: {"*.down_proj": replicated}}}',
        'model: {hf: ./llama}\nparallel: {tensor: {degree: 2, patterns: {"*.mlp": replicated}}}',
        "command",
    ),
    Rule(
        "PT442",
        "It is not clear how tensor-parallel ranks can share a module",
        "A cut that does not match the model's own code would train another model, and a copy on every rank would use "
        "the memory that tensor parallelism should save; so the spec must decide.",
        "model: {hf: ./my-model}   # a fused qkv of unknown order\nparallel: {tensor: 2}",
        "model: {hf: ./my-model}\n"
        'parallel: {tensor: {degree: 2, patterns: {"*.qkv": {style: column, parts: [512, 128, 128]}}}}',
        "command",
    ),
    Rule(
        "PT443",
        "A pattern cuts partool's own decoder in a way that its layers do not support",
        "Each layer of partool's decoder supports one way to cut it; models that transformers builds support others.",
        _MODEL + _TWO_GPUS + 'parallel: {tensor: {degree: 2, patterns: {"*.ffn.down": replicated}}}\n',
        _MODEL + _TWO_GPUS + 'parallel: {tensor: {degree: 2, patterns: {"*.ffn.down": row}}}\n',
    ),
    Rule(
        "PT444",
        "Tensor-parallel ranks have no part of a matrix",
        "Heads are cut whole, and widths into the sizes of torch.chunk, so that with many ranks the last ones may get "
        "nothing: they hold the rest of the model and wait for the others.",
        "model: {layers: 2, hidden: 64, heads: 2, vocab: 256}\n"
        + _FOUR_GPUS + "training: {global_batch: 4}\nparallel: {tensor: 4}\n",
        "model: {layers: 2, hidden: 64, heads: 2, vocab: 256}\n"
        + _FOUR_GPUS + "training: {global_batch: 4}\nparallel: {tensor: 2}\n",
    ),
    Rule(
        "PT445",
        "No tensor parallelism is tried",
        "With degree: auto, a model with a module that no rule can cut is planned without tensor parallelism; a "
        "pattern for that module makes it possible again.",
        "model: {hf: ./my-model}   # a norm over the width of all heads",
        "model: {hf: ./my-model}\n"
        'parallel: {tensor: {patterns: {"*.q_proj": column_gathered, "*.k_proj": column_gathered}}}',
        "command",
    ),
    Rule(
        "PT446",
        "A tensor-parallel setting with a single tensor rank",
        "sequence_norms, overlap and chunks are about exchanges between several tensor ranks; one rank has none.",
        _MODEL + _TWO_GPUS + "parallel: {tensor: {degree: 1, overlap: backward}}\n",
        _MODEL + _TWO_GPUS + "parallel: {tensor: {degree: 2, overlap: backward}}\n",
    ),
)  # fmt: skip
