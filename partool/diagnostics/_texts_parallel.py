"""Rules about pipelines, sequence parallelism and tensor parallelism that need the model, the devices or both."""

from __future__ import annotations

from partool.diagnostics.record import Rule

_FOUR = (
    "model: {layers: 8, hidden: 64, heads: 4, vocab: 256}\nhardware: {accelerator: h100-sxm, per_node: 4}\n"
    "data: python-stdlib\n"
)
_HELD_OUT = _FOUR.replace("data: python-stdlib", "data: {source: python-stdlib, validation: 0.01}")
_ROUNDS = "parallel: {micro_batch: 1, pipeline: {stages: 4, schedule: interleaved, chunks: 2}}\n"
_FOUR_GPUS = "hardware: {accelerator: h100-sxm, per_node: 4}\ndata: python-stdlib\n"
_DATA = "data: python-stdlib\n"
_MODEL = "model: {layers: 2, hidden: 64, heads: 4, vocab: 256}\n"
_SLIDING = "model: {layers: 2, hidden: 64, heads: 4, vocab: 256, attention: {window: 512}}\n"


def _gpus(count: int, extra: str, model: str = _MODEL) -> str:
    return model + f"hardware: {{accelerator: h100-sxm, per_node: {count}}}\n" + _DATA + extra + "\n"


RULES: tuple[Rule, ...] = (
    Rule(
        "PT430",
        "The schedule cannot take this number of micro-batches",
        "Interleaved schedules and WeiPipe take micro-batches in rounds of one per rank; a schedule file has a fixed "
        "number. There are global_batch / (data-parallel ranks · micro_batch) micro-batches.",
        _FOUR + "training: {global_batch: 6}\n" + _ROUNDS,
        _FOUR + "training: {global_batch: 8}\n" + _ROUNDS,
    ),
    Rule(
        "PT432",
        "The schedule's file cannot be read",
        "One row per rank, one action per cell: stage, kind and micro-batch, such as 0F3; rows that begin with # are "
        "comments.",
        _FOUR + "parallel: {pipeline: {stages: 4, schedule: {file: nowhere.csv}}}\n",
        _FOUR + "parallel: {pipeline: {stages: 4, schedule: 1f1b}}\n",
    ),
    Rule(
        "PT433",
        "The schedule in the file would hang or train wrongly",
        "Every stage processes each micro-batch once, messages are received in the order in which they are sent, and "
        "no rank waits for ever. A schedule that breaks this hangs, or silently trains on wrong gradients.",
        "partool schedule --check my.csv   # rank 1 receives micro-batch 2 before 1",
        "partool schedule 1f1b --ranks 2 --micro-batches 4",
        "command",
    ),
    Rule(
        "PT437",
        "The spec contradicts the schedule's file",
        "The file says how many ranks and stages there are, and which of them belong together.",
        "partool plan spec.yaml   # stages: 4, and a file with 2 rows",
        "partool plan spec.yaml   # stages: auto, or 2",
        "command",
    ),
    Rule(
        "PT265",
        "More sequence-parallel ranks than tokens",
        "Shares need not be equal, but each rank needs a token. dsp cuts rows and columns in turn, and needs one row "
        "and one column for every rank.",
        _gpus(8, "training: {sequence_length: 4}\nparallel: {sequence: {degree: 8}}"),
        _gpus(4, "training: {sequence_length: 4}\nparallel: {sequence: {degree: 4}}"),
    ),
    Rule(
        "PT466",
        "startrail teams whose square does not divide the ranks",
        "Teams of C ranks form C · C rings, each of ranks / C² (arXiv 2407.00611); only then does each team meet all "
        "keys exactly once.",
        _gpus(8, "parallel: {sequence: {method: startrail, degree: 8, teams: 4}}"),
        _gpus(8, "parallel: {sequence: {method: startrail, degree: 8, teams: 2}}"),
    ),
    Rule(
        "PT467",
        "usp groups that do not divide the ranks",
        "Ranks that trade heads form groups of one size, and the groups form a ring (arXiv 2405.07719). With groups of "
        "one rank usp is ring, with a single group it is ulysses.",
        _gpus(8, "parallel: {sequence: {method: usp, degree: 8, ulysses: 3}}"),
        _gpus(8, "parallel: {sequence: {method: usp, degree: 8, ulysses: 4}}"),
    ),
    Rule(
        "PT468",
        "Zigzag order with windowed layers",
        "A window's keys are just before it: a rank with one stretch fetches them from the rank before, one with two "
        "fetches two windows from several. Single stretches already balance the work in narrow windows; zigzag "
        "balances layers that attend to all tokens, or many, and is for models that have some.",
        _gpus(4, "parallel: {sequence: {method: ring, degree: 4, order: zigzag}}", _SLIDING),
        _gpus(4, "parallel: {sequence: {method: ring, degree: 4}}", _SLIDING),
    ),
    Rule(
        "PT469",
        "The method does not fit the axes along which layers attend",
        "dsp keeps the axis whole along which a layer attends (arXiv 2403.10266), so every layer must attend along "
        "rows or columns; methods that send keys around know one axis, the sequence.",
        _gpus(4, "parallel: {sequence: {method: dsp, degree: 4}}"),
        _gpus(4, "parallel: {sequence: {method: ulysses, degree: 4}}"),
    ),
    Rule(
        "PT470",
        "More ranks trade heads than there are heads",
        "A rank without a head computes nothing while the others attend; rings have no such limit.",
        _gpus(8, "parallel: {sequence: {method: ulysses, degree: 8}}"),
        _gpus(8, "parallel: {sequence: {method: usp, degree: 8, ulysses: 4}}"),
    ),
    Rule(
        "PT471",
        "Sequence parallelism with a schedule that moves weights",
        "Where weights move between ranks (WeiPipe), each micro-batch stays on one rank, which holds whole sequences.",
        _gpus(4, "parallel: {sequence: 2, pipeline: {stages: 2, schedule: weipipe}}"),
        _gpus(4, "parallel: {sequence: 2, pipeline: {stages: 2, schedule: 1f1b}}"),
    ),
    Rule(
        "PT479",
        "Tiled feed-forward networks in compiled layers",
        "A compiler turns a layer into one program, which merges the tensors of its tiles again.",
        _gpus(1, "parallel: {tiles: {mlp: 256}, compile: block}"),
        _gpus(1, "parallel: {tiles: {mlp: 256}, compile: none}"),
    ),
    Rule(
        "PT480",
        "Tiles of networks that mix tokens or draw random numbers",
        "A tile is computed by itself, and again in the backward pass: networks with random numbers would draw others "
        "then, and experts receive tokens from anywhere.",
        _gpus(
            8,
            "parallel: {tiles: {mlp: 1024}}",
            _MODEL.replace("}\n", ", moe: {experts: 4, top_k: 2, ffn_hidden: 64}}\n"),
        ),
        _gpus(8, "parallel: {tiles: {mlp: 1024}}"),
    ),
    Rule(
        "PT481",
        "Tiles of tokens of which a tensor rank holds a share",
        "With sequence_norms a rank holds a share of the tokens, with two-dimensional tensor parallelism a share of "
        "every token's width: tiles would be gathered one by one.",
        _gpus(2, "parallel: {tiles: {mlp: 1024}, tensor: {degree: 2, sequence_norms: true}}"),
        _gpus(2, "parallel: {tiles: {mlp: 1024}, tensor: {degree: 2, sequence_norms: false}}"),
    ),
    Rule(
        "PT482",
        "Tiles with a schedule that moves weights",
        "In WeiPipe (PPoPP'25) the ranks of a pipeline pass weights on and recompute whole stages.",
        _gpus(2, "parallel: {tiles: {loss: 1024}, pipeline: {stages: 2, schedule: weipipe}}"),
        _gpus(2, "parallel: {tiles: {loss: 1024}, pipeline: {stages: 2, schedule: 1f1b}}"),
    ),
    Rule(
        "PT455",
        "The tensor-parallel shape does not match the degree",
        "A shape [d1, d2] arranges the tensor-parallel ranks, so d1 · d2 must be their number.",
        _MODEL + _FOUR_GPUS + "parallel: {tensor: {degree: 4, shape: [4, 2]}}\n",
        _MODEL + _FOUR_GPUS + "parallel: {tensor: {degree: 4, shape: [2, 2]}}\n",
    ),
    Rule(
        "PT456",
        "The model cannot be cut in two dimensions",
        "Two-dimensional tensor parallelism (ATP, arXiv 2301.08658) cuts heads over all d1 · d2 ranks, inner widths "
        "over d1 and the hidden size over d2, each into equal parts.",
        "model: {layers: 2, hidden: 60, heads: 6, vocab: 256}\n"
        + _FOUR_GPUS
        + "parallel: {tensor: {degree: 4, shape: [2, 2]}}\n",
        _MODEL + _FOUR_GPUS + "parallel: {tensor: {degree: 4, shape: [2, 2]}}\n",
    ),
    Rule(
        "PT457",
        "sequence_norms where the hidden size is cut",
        "Two-dimensional tensor parallelism cuts the residual stream's width over the inner ranks; it cannot cut its "
        "tokens over the same ranks as well.",
        _MODEL + _FOUR_GPUS + "parallel: {tensor: {shape: [2, 2], sequence_norms: true}}\n",
        _MODEL + _FOUR_GPUS + "parallel: {tensor: {shape: [4, 1], sequence_norms: true}}\n",
    ),
    Rule(
        "PT458",
        "Fused collectives without symmetric memory",
        "overlap: symmetric fuses products and collectives into one kernel over memory that the devices of a node map "
        "for each other, which PyTorch has for CUDA only.",
        _MODEL + "hardware: {accelerator: cpu, per_node: 2}\ndata: python-stdlib\n"
        "training: {precision: fp32}\nparallel: {tensor: {degree: 2, overlap: symmetric}}\n",
        _MODEL + "hardware: {accelerator: cpu, per_node: 2}\ndata: python-stdlib\n"
        "training: {precision: fp32}\nparallel: {tensor: {degree: 2, overlap: backward}}\n",
    ),
    Rule(
        "PT459",
        "Tensor parallelism with a schedule that moves weights",
        "WeiPipe's ranks work on different micro-batches with whole weights that go round; ranks that share every "
        "matrix would have to work on the same micro-batches.",
        "model: {layers: 4, hidden: 64, heads: 4, vocab: 256}\n"
        + _FOUR_GPUS
        + "parallel: {tensor: 2, pipeline: {stages: 2, schedule: weipipe}}\n",
        "model: {layers: 4, hidden: 64, heads: 4, vocab: 256}\n"
        + _FOUR_GPUS
        + "parallel: {tensor: 2, pipeline: {stages: 2, schedule: 1f1b}}\n",
    ),
    Rule(
        "PT498",
        "Perturbed embeddings do not run with this",
        "A perturbation's gradient goes through the whole model before the passes of training begin. Pipelines have no "
        "such pass, tensor ranks in two dimensions hold parts of each embedding, and the loads of experts would count "
        "twice. Where pipeline.stages is auto, it is 1.",
        _FOUR + "training: {adversarial: {epsilon: 0.1}}\nparallel: {pipeline: 2}\n",
        _FOUR + "training: {adversarial: {epsilon: 0.1}}\nparallel: {pipeline: 1}\n",
    ),
    Rule(
        "PT499",
        "Perturbations that begin after the last step",
        "Embeddings are perturbed from step start_step on, counted from 0; training ends before.",
        _FOUR + "training: {steps: 100, adversarial: {epsilon: 0.1, start_step: 100}}\n",
        _FOUR + "training: {steps: 100, adversarial: {epsilon: 0.1, start_step: 50}}\n",
    ),
    Rule(
        "PT420",
        "Pairs of answers do not run with this",
        "The losses of single tokens become sums of log-probabilities before they are compared. Schedules that move "
        "weights and tensor ranks in two dimensions have no such sums, and whatever else changes a token's loss would "
        "change the comparison.",
        _FOUR + "training: {objective: dpo, z_loss: 1.0e-4}\n",
        _FOUR + "training: {z_loss: 1.0e-4}\n",
    ),
    Rule(
        "PT427",
        "Prompts are not continued in this layout",
        "The likeliest next token is looked up where the loss is computed. Schedules that move weights, and tensor "
        "ranks in two dimensions, compute the loss in their own ways.",
        _HELD_OUT
        + "training: {validation: {prompts: [Hello]}}\nparallel: {pipeline: {stages: 2, schedule: weipipe}}\n",
        _HELD_OUT + "training: {validation: {prompts: [Hello]}}\nparallel: {pipeline: {stages: 2, schedule: 1f1b}}\n",
    ),
    Rule(
        "PT404",
        "A teacher does not run with this",
        "The teacher goes over each micro-batch before its student, on the same ranks, and its last hidden state is "
        "kept until the student's loss. It is partool's own decoder, with its weights on the device, cut as the "
        "student is. Where pipeline.stages is auto, it is 1.",
        _FOUR + "training: {distill: runs/teacher}\nparallel: {pipeline: 2}\n",
        _FOUR + "training: {distill: runs/teacher}\nparallel: {pipeline: 1}\n",
        "command",
    ),
    Rule(
        "PT421",
        "There is no adapter to switch off",
        "A model with an adapter is its own reference without it. Without an adapter all weights are trained, and the "
        "reference is what the first weights say of the data, kept before the first step, or a frozen copy of them.",
        _FOUR + "training: {objective: {kind: dpo, reference: adapter_off}}\n",
        _FOUR + "adapter: {}\ntraining: {objective: {kind: dpo, reference: adapter_off}}\n",
        "command",
    ),
    Rule(
        "PT422",
        "Without its adapter the model is not what it was",
        "Parameters that are trained in full beside the adapter change with every step, and nothing keeps their first "
        "values: the model without its adapter would be a reference that moves.",
        _FOUR + "adapter: {train: [head]}\ntraining: {objective: {kind: dpo, reference: adapter_off}}\n",
        _FOUR + "adapter: {}\ntraining: {objective: {kind: dpo, reference: adapter_off}}\n",
        "command",
    ),
    Rule(
        "PT423",
        "A frozen copy is not read from files",
        "Parameters in files belong to the model that is trained. A frozen copy is on the device, or in host memory.",
        _FOUR + "parallel: {data: {zero: 3}, offload: {optimizer: cpu, parameters: nvme, dir: /tmp}}\n"
        "training: {objective: {kind: dpo, reference: copy}}\n",
        _FOUR + "parallel: {data: {zero: 3}, offload: {optimizer: cpu, parameters: nvme, dir: /tmp}}\n"
        "training: {objective: {kind: dpo}}\n",
        "command",
    ),
    Rule(
        "PT424",
        "A moving average that the runtime does not keep",
        "The average is updated on the device, beside the optimizer's state. State in host memory or in files is "
        "updated by the host while the device goes on, and with exchanges of one bit ranks have weights of their own "
        "between exchanges.",
        _FOUR + "training: {ema: 0.999}\nparallel: {offload: {optimizer: cpu}}\n",
        _FOUR + "training: {ema: 0.999}\n",
    ),
)
