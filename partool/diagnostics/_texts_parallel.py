"""Rules about pipelines, sequence parallelism and tensor parallelism that need the model, the devices or both."""

from __future__ import annotations

from partool.diagnostics.record import Rule

_FOUR = (
    "model: {layers: 8, hidden: 64, heads: 4, vocab: 256}\nhardware: {accelerator: h100-sxm, per_node: 4}\n"
    "data: python-stdlib\n"
)
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
        "The schedule does not take so many micro-batches",
        "Interleaved schedules and WeiPipe send micro-batches round in groups of one per rank; a file has its own "
        "number. Micro-batches are global_batch over data-parallel ranks and micro_batch.",
        _FOUR + "training: {global_batch: 6}\n" + _ROUNDS,
        _FOUR + "training: {global_batch: 8}\n" + _ROUNDS,
    ),
    Rule(
        "PT432",
        "The schedule's file cannot be read",
        "One row per rank, one action per cell: stage, kind and micro-batch, such as 0F3; rows that begin with # are "
        "remarks.",
        _FOUR + "parallel: {pipeline: {stages: 4, schedule: {file: nowhere.csv}}}\n",
        _FOUR + "parallel: {pipeline: {stages: 4, schedule: 1f1b}}\n",
    ),
    Rule(
        "PT433",
        "The schedule in the file is not sound",
        "Every stage works once on each micro-batch, what is sent is received in the same order, and no rank waits for "
        "ever: a list that breaks this hangs, or trains on wrong gradients without a word.",
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
        "More sequence-parallel ranks than there is sequence",
        "Shares need not be even, but each rank holds a token; dsp cuts rows and columns by turns, and needs one of "
        "each for every rank.",
        _gpus(8, "training: {sequence_length: 4}\nparallel: {sequence: {degree: 8}}"),
        _gpus(4, "training: {sequence_length: 4}\nparallel: {sequence: {degree: 4}}"),
    ),
    Rule(
        "PT466",
        "Teams of startrail whose square does not divide the ranks",
        "Teams of C ranks form C · C rings, each of ranks / C² (arXiv 2407.00611); only then each team meets all keys "
        "exactly once.",
        _gpus(8, "parallel: {sequence: {method: startrail, degree: 8, teams: 4}}"),
        _gpus(8, "parallel: {sequence: {method: startrail, degree: 8, teams: 2}}"),
    ),
    Rule(
        "PT467",
        "Groups of usp that do not divide the ranks",
        "Ranks that trade heads form groups of one size, and the groups a ring (arXiv 2405.07719); with one rank in "
        "either it is ulysses or ring by itself.",
        _gpus(8, "parallel: {sequence: {method: usp, degree: 8, ulysses: 3}}"),
        _gpus(8, "parallel: {sequence: {method: usp, degree: 8, ulysses: 4}}"),
    ),
    Rule(
        "PT468",
        "Windowed layers, and ranks that hold two stretches",
        "A window's keys are the ones just before it: a rank with one stretch fetches them from the rank before, one "
        "with two fetches two windows from several. Work in narrow windows is balanced over single stretches already; "
        "zigzag balances layers that see everything, or much of it, and is for models that have some.",
        _gpus(4, "parallel: {sequence: {method: ring, degree: 4, order: zigzag}}", _SLIDING),
        _gpus(4, "parallel: {sequence: {method: ring, degree: 4}}", _SLIDING),
    ),
    Rule(
        "PT469",
        "A method that does not know the axes along which layers attend",
        "dsp keeps the axis whole along which a layer attends (arXiv 2403.10266), so every layer attends along a row "
        "or a column; methods whose keys travel know one axis, the sequence.",
        _gpus(4, "parallel: {sequence: {method: dsp, degree: 4}}"),
        _gpus(4, "parallel: {sequence: {method: ulysses, degree: 4}}"),
    ),
    Rule(
        "PT470",
        "More ranks trade heads than there are",
        "A rank without a head computes nothing while the others attend; rings have no such limit.",
        _gpus(8, "parallel: {sequence: {method: ulysses, degree: 8}}"),
        _gpus(8, "parallel: {sequence: {method: usp, degree: 8, ulysses: 4}}"),
    ),
    Rule(
        "PT471",
        "Sequence parallelism beside what needs whole sequences",
        "Where weights travel, each micro-batch stays on one rank, which holds its sequences whole.",
        _gpus(4, "parallel: {sequence: 2, pipeline: {stages: 2, schedule: weipipe}}"),
        _gpus(4, "parallel: {sequence: 2, pipeline: {stages: 2, schedule: 1f1b}}"),
    ),
    Rule(
        "PT479",
        "Tiles of a network in compiled layers",
        "A compiler makes one program of a layer and merges what its tiles hold again.",
        _gpus(1, "parallel: {tiles: {mlp: 256}, compile: block}"),
        _gpus(1, "parallel: {tiles: {mlp: 256}, compile: none}"),
    ),
    Rule(
        "PT480",
        "Tiles of what is no function of single tokens",
        "A tile is computed by itself and once more in the backward pass: networks that draw random numbers would draw "
        "others then, and experts are given tokens from anywhere.",
        _gpus(
            8,
            "parallel: {tiles: {mlp: 1024}}",
            _MODEL.replace("}\n", ", moe: {experts: 4, top_k: 2, ffn_hidden: 64}}\n"),
        ),
        _gpus(8, "parallel: {tiles: {mlp: 1024}}"),
    ),
    Rule(
        "PT481",
        "Tiles of tokens that a tensor rank does not hold whole",
        "With sequence_norms a rank holds a share of the tokens, in two dimensions a share of every token: tiles would "
        "be gathered one by one.",
        _gpus(2, "parallel: {tiles: {mlp: 1024}, tensor: {degree: 2, sequence_norms: true}}"),
        _gpus(2, "parallel: {tiles: {mlp: 1024}, tensor: {degree: 2, sequence_norms: false}}"),
    ),
    Rule(
        "PT482",
        "Tiles where weights travel",
        "There the ranks of a pipeline pass weights on and compute stages again as a whole (WeiPipe, PPoPP'25).",
        _gpus(2, "parallel: {tiles: {loss: 1024}, pipeline: {stages: 2, schedule: weipipe}}"),
        _gpus(2, "parallel: {tiles: {loss: 1024}, pipeline: {stages: 2, schedule: 1f1b}}"),
    ),
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
