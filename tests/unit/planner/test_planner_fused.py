"""Which parts of a model a plan gives to partool's kernels, and what it says of that."""

from __future__ import annotations

import pytest
from often import often
from planned import result_of

from partool.plan.schedule import ENDS_WITH_ONE, splits_backward
from partool.plan.types import Plan
from partool.schedule import generate
from partool.schedule.simulate import peak_held
from partool.strategies.schedules import SCHEDULES

SPEC = """\
model: {{layers: 2, hidden: 256, heads: 4, vocab: 1024, activation: {activation}, position: {position}}}
hardware: {{accelerator: {accelerator}, per_node: {ranks}}}
data: python-stdlib
training: {{global_batch: 4, sequence_length: 128, precision: {precision}}}
parallel: {{compile: {compile}}}
kernels: {{mode: {mode}, fused: {fused}}}
"""
USUAL = {
    "activation": "swiglu", "position": "rope", "accelerator": "h100-sxm", "ranks": 1, "precision": "bf16",
    "compile": "none", "mode": "auto", "fused": "auto",
}  # fmt: skip
ALL = ("norm", "glu", "rope", "loss")
SHARED = {"ranks": 4, "compile": "none, tensor: {shape: [2, 2]}"}
LION = {"compile": "none}\noptimizer: {name: lion"}
HOST = {"compile": "none, offload: {optimizer: cpu}"}


def planned(**changes: object) -> tuple[Plan | None, dict[str, str]]:
    """Return the plan, and its findings by code."""
    result = result_of(SPEC.format(**(USUAL | changes)))
    return result.plan, {finding.code: finding.message for finding in result.diagnostics}


CHOICES: list[tuple[dict[str, object], tuple[str, ...]]] = [
    ({}, ALL),
    ({"accelerator": "mi300x"}, ALL),
    ({"accelerator": "mi355x", "compile": "auto"}, ("loss",)),
    ({"compile": "block"}, ("loss",)),
    ({"precision": "fp32"}, ALL),
    ({"precision": "fp64"}, ()),
    ({"mode": "native"}, ALL),
    ({"mode": "torch"}, ()),
    ({"accelerator": "v100-16", "precision": "fp16"}, ()),
    ({"accelerator": "cpu"}, ()),
    ({"activation": "gelu", "position": "learned"}, ("norm", "loss")),
    ({"fused": "[]"}, ()),
    ({"fused": "[adamw, norm]"}, ("norm", "adamw")),
    ({"fused": "[rope]", "compile": "block"}, ("rope",)),
    ({"fused": "[norm]", "accelerator": "cpu"}, ("norm",)),
    (SHARED, ("glu", "rope", "loss")),
]


@pytest.mark.parametrize(("changes", "fused"), often(CHOICES, [*CHOICES[2:6], *CHOICES[9:11], *CHOICES[13:]]))
def test_parts_follow_device_compiler_and_precision(changes: dict[str, object], fused: tuple[str, ...]) -> None:
    plan, found = planned(**changes)
    assert plan is not None, found
    assert plan.layout.derived.fused == fused
    assert ("PT486" in found) == ("fused" in changes and changes.get("accelerator") == "cpu")
    words = " ".join(plan.reasons)
    assert ("Own kernels:" in words) == (bool(fused) and "fused" not in changes)


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"fused": "[glu]", "activation": "relu"}, "PT485", "activation: relu has no gate"),
        ({"fused": "[rope]", "position": "learned"}, "PT485", "positions are not rotated"),
        ({"fused": "[adamw]", **LION}, "PT485", "optimizer.name is lion"),
        ({"mode": "native", "accelerator": "v100-16", "precision": "fp16"}, "PT270", "which v100-16 has none of"),
        ({"fused": "[norm]", **SHARED}, "PT486", "norm will be computed by torch's operators: 2 tensor ranks share"),
        ({"fused": "[adamw]", **HOST}, "PT486", "adamw will be computed on the host: the optimizer's state"),
        ({"fused": "[norm]", "precision": "fp64"}, "PT486", "precision is fp64"),
        ({"fused": "[norm]", "mode": "torch"}, "PT486", "kernels.mode is torch"),
        ({"fused": "[norm]", "accelerator": "v100-16", "precision": "fp16"}, "PT486", "none for|ones for v100-16"),
    ],
)
def test_what_cannot_be_fused_is_said(changes: dict[str, object], code: str, words: str) -> None:
    plan, found = planned(**changes)
    assert code in found
    assert any(part in found[code] for part in words.split("|"))
    assert (plan is None) == (code != "PT486")


def test_fused_parts_save_time_and_memory() -> None:
    """Of an eager plan, against torch's operators: less traffic, fewer kernels, less kept."""
    ours, eager = planned(fused="[norm, glu, rope]")[0], planned(fused="[]")[0]
    assert ours is not None
    assert eager is not None
    assert ours.prediction.time.step_time_s < eager.prediction.time.step_time_s
    saved = [plan.prediction.memory.terms_bytes["activations"] for plan in (ours, eager)]
    assert saved[0] < saved[1]
    assert ours.hash != eager.hash


@pytest.mark.parametrize("changes", [SHARED | {"fused": "[norm, glu]"}, HOST | {"fused": "[adamw]"}])
def test_plans_say_which_parts_torch_computes_all_the_same(changes: dict[str, object]) -> None:
    plan, _ = planned(**changes)
    assert plan is not None
    assert sum("No own kernel for" in reason for reason in plan.reasons) == 1


def test_gradients_come_with_the_loss_where_schedules_hold_one_micro_batch_at_the_end() -> None:
    found = set()
    for name in SCHEDULES:
        chunks = 2 if name in {"interleaved", "zb-v", "hanayo"} else 1
        schedule = generate(name, 4, 8, chunks, 0)
        last = schedule.stages - 1
        held = (peak_held([action for action in actions if action.stage == last]) for actions in schedule.lists)
        if max(held) == 1 and not splits_backward(schedule):
            found.add(name)
    assert found == ENDS_WITH_ONE
