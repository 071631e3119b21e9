"""Traffic of two-dimensional tensor parallelism, against closed forms."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from partool.cost.case import Layouts
from partool.cost.traffic.messages import Move
from partool.cost.traffic.two_dim import embedding_moves, head_moves, layer_moves
from partool.spec.hardware import Devices
from partool.spec.model import ModelConfig
from partool.work.training import TrainingWork

DEVICES = Devices(
    accelerator="test", backend="cuda", nodes=1, per_node=8, memory_bytes=2**36, peak_flops=1e15, achievable_flops=8e14,
    memory_bytes_per_s=3e12, link_bytes_per_s=4e11, fabric_bytes_per_s=5e10,
)  # fmt: skip
HIDDEN, TOKENS, VOCAB = 64, 3 * 32, 96
GPT = ModelConfig(
    layers=1, hidden=HIDDEN, ffn_hidden=4 * HIDDEN, heads=8, kv_heads=8, head_dim=8, vocab=VOCAB, activation="gelu"
)
SHAPES = [(d1, ranks // d1) for ranks in (4, 8) for d1 in (1, 2, 4) if ranks // d1 > 1]


def moves_of(shape: tuple[int, int], model: ModelConfig = GPT) -> tuple[TrainingWork, Layouts]:
    job = TrainingWork(model, DEVICES, 32, "bf16", global_batch=3)
    return job, Layouts(tp=shape[0] * shape[1], tensor_inner=shape[1], micro_batch=3)


def sent(moves: Iterable[Move], shape: tuple[int, int]) -> float:
    """Return the elements that a rank sends in rings, without the statistics of norms and of the loss."""
    ranks = {"tp0": shape[0], "tp1": shape[1], "tp": shape[0] * shape[1]}
    total = 0.0
    for move in moves:
        if not move.wide:
            rounds = 2 if move.kind == "all_reduce" else 1
            size = ranks[move.axis]
            total += float(move.rows) * float(move.width) * float(move.times) * rounds * (size - 1) / size
    return total


@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_sends_what_the_shardings_say(shape: tuple[int, int]) -> None:
    """12·bsh/d1 are summed over d2 and 4·bsh/d2 over d1, for a layer with n_kv = n_heads and an MLP of width 4·h."""
    d1, d2 = shape
    moves = layer_moves(*moves_of(shape))
    whole = TOKENS * HIDDEN
    over_d2 = 12 * whole / d1 * 2 * (d2 - 1) / d2
    over_d1 = 4 * whole / d2 * 2 * (d1 - 1) / d1
    assert sent([*moves.forward, *moves.backward], shape) == pytest.approx(over_d2 + over_d1, rel=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_head_sends_less_than_a_sum_over_all_ranks(shape: tuple[int, int]) -> None:
    ranks = shape[0] * shape[1]
    moves = head_moves(*moves_of(shape))
    whole_sum = TOKENS * HIDDEN * 2 * (ranks - 1) / ranks
    assert sent(moves.backward, shape) <= whole_sum
    # Gathering hidden states over all of d2 is the only traffic that one-dimensional parallelism does not have.
    assert sent(moves.forward, shape) == pytest.approx(TOKENS * HIDDEN * (shape[1] - 1) / shape[1])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tied_embedding_sends_less_than_its_logits_would(shape: tuple[int, int]) -> None:
    tied = GPT.model_copy(update={"tied_embeddings": True, "vocab": 50 * HIDDEN})
    moves = embedding_moves(*moves_of(shape, tied))
    logits = TOKENS * tied.vocab / shape[0] * 2 * (shape[1] - 1) / shape[1]
    assert sent([*moves.forward, *moves.backward], shape) < logits


def test_one_dimension_sends_none_of_it() -> None:
    job = TrainingWork(GPT, DEVICES, 32, "bf16", global_batch=3)
    for lister in (embedding_moves, layer_moves, head_moves):
        moves = lister(job, Layouts(tp=4, micro_batch=3))
        assert sent([*moves.forward, *moves.backward, *moves.recompute], (4, 1)) == 0.0
