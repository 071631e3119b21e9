"""Rules about pipelines that need the model, the devices or the schedule's own lists."""

from __future__ import annotations

from partool.diagnostics.record import Rule

_FOUR = (
    "model: {layers: 8, hidden: 64, heads: 4, vocab: 256}\nhardware: {accelerator: h100-sxm, per_node: 4}\n"
    "data: python-stdlib\n"
)
_ROUNDS = "parallel: {micro_batch: 1, pipeline: {stages: 4, schedule: interleaved, chunks: 2}}\n"

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
)
