"""Sizes of experts in the table of DeepSpeed-MoE (arXiv 2201.05596, sections 4.1 and 4.2), by counting parameters.

Experts are in every second layer. A pyramid has more of them in its last two layers with experts; as the layers of one
model have equal numbers, its experts are those of two models, of the layers before and of the last two.
"""

from __future__ import annotations

import pytest

from partool.layout.parameters import parameters
from partool.spec.model import ModelConfig, Moe


def expert_weights(hidden: int, layers: int, experts: int) -> int:
    """Return the number of weights in the experts of a GPT with experts in every second of its ``layers``."""
    moe = Moe(experts=experts, top_k=1, ffn_hidden=4 * hidden, every=2)
    model = ModelConfig(
        layers=layers, hidden=hidden, ffn_hidden=4 * hidden, heads=16, kv_heads=16, head_dim=hidden // 16,
        vocab=51_200, activation="gelu", position="learned", max_position=2048, moe=moe,
    )  # fmt: skip
    return sum(info.elements for info in parameters(model) if info.kind == "expert")


@pytest.mark.parametrize(
    ("hidden", "pyramid", "billions"),
    [
        (1024, [(12, 128)], 12.9),
        (1024, [(10, 32), (2, 64)], 3.76),
        (1024, [(8, 32), (2, 64)], 3.22),
        (2048, [(10, 64), (2, 128)], 30.1),
        (2048, [(8, 64), (2, 128)], 25.8),
    ],
    ids=["350M+128", "350M pyramid", "350M student", "1.3B pyramid", "1.3B student"],
)
def test_experts_of_the_table(hidden: int, pyramid: list[tuple[int, int]], billions: float) -> None:
    weights = sum(expert_weights(hidden, 2 * layers, experts) for layers, experts in pyramid)
    assert weights == sum(layers * experts for layers, experts in pyramid) * 8 * hidden**2
    assert weights / 1e9 == pytest.approx(billions, rel=0.005)


def test_a_student_has_an_eighth_of_the_layers_less() -> None:
    """24 layers of the teacher, 21 of the student; 12 and 10 of them have experts."""
    of_teacher, of_student = (10 * 64 + 2 * 128, 8 * 64 + 2 * 128)
    assert 21 / 24 == 1 - 0.125
    assert of_student / of_teacher == pytest.approx(25.8 / 30.1, rel=0.005)
