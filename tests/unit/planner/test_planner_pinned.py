"""A limit of pinned memory: layouts that need more are not chosen; if all need more, the finding names remedies."""

from __future__ import annotations

from pathlib import Path

from planned import result_of

from partool.planner import PlanResult, make_plan
from partool.spec import load_text

ONE = """\
model: llama3-8b
hardware: {accelerator: gh200-96, per_node: 1}
data: python-stdlib
training: {sequence_length: 4096, global_batch: 16}
"""


def plan_of(**fields: str) -> PlanResult:
    return result_of(ONE, *(f"parallel.offload.{name}={value}" for name, value in fields.items()))


def test_layouts_that_pin_too_much_are_not_chosen() -> None:
    free, limited = (
        result_of(ONE, "limits.prefer=fastest", "hardware.host_memory_gib=480", *more).plan
        for more in ((), ("parallel.offload.pinned_gib=100",))
    )
    assert free is not None
    assert limited is not None
    assert free.prediction.memory.pinned_bytes > 100 * 2**30 > limited.prediction.memory.pinned_bytes


def test_what_would_help_is_what_the_spec_asks_for() -> None:
    for asked, helps in (({}, ()), ({"activations": "cpu"}, ("activations: none",))):
        found = [one for one in plan_of(pinned_gib="0.01", **asked).diagnostics if one.code == "PT473"]
        assert len(found) == 1
        assert [word for word in ("activations: none", "gpu_fraction", "bf16") if word in found[0].help] == [*helps]


def test_fields_that_say_nothing_are_named() -> None:
    small = ["model={layers: 2, hidden: 256, heads: 4, vocab: 8192}", "parallel.offload.speculate=false"]
    loaded = load_text(ONE, overrides=small)
    assert loaded.spec is not None
    found = make_plan(loaded.spec, base_dir=Path("/base"), default_name="test").diagnostics
    assert [one.message.split(" changes")[0] for one in found if one.code == "PT497"] == ["speculate: false"]
