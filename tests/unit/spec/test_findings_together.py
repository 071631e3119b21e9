"""One run reports every mistake that does not depend on another mistake, and nothing that follows from a stand-in."""

from __future__ import annotations

from pathlib import Path

import pytest
from _mistakes import FOLDER, NEEDS, drawn, found_in
from often import often

from partool.cli.main import run
from partool.planner import check_rest
from partool.spec import load_text
from partool.spec.spec import Spec
from partool.spec.watched import independent, reading, standing_in, watched


@pytest.mark.parametrize("seed", often(range(24), (0,)))
def test_mistakes_of_different_sections_come_in_one_run(seed: int) -> None:
    for chosen in drawn(seed, 8):
        found = found_in(tuple((each.section, each.bad) for each in chosen))
        sections = {each.section for each in chosen}
        for each in chosen:
            expected = {finding for finding in each.alone if finding[0] == each.code}
            if each.read or not NEEDS.get(each.section, set()) & sections:
                assert expected <= found, chosen
        possible = frozenset[tuple[str, str]]().union(*(each.alone for each in chosen))
        if more := found - possible:  # what the sections do not agree about, which correcting the mistakes leaves
            assert more <= found_in(tuple((each.section, each.good) for each in chosen)), chosen


def codes(text: str, *overrides: str) -> set[str]:
    """Return the codes that one run finds before the search."""
    loaded = load_text(text, overrides=list(overrides))
    assert loaded.spec is None
    assert loaded.rest is not None
    return {each.code for each in [*loaded.diagnostics, *check_rest(loaded.rest, FOLDER, loaded.diagnostics)]}


MODEL = "model: {layers: 2, hidden: 64, heads: 4, vocab: 256}\n"
CPU = "hardware: {accelerator: cpu, per_node: 4}\ndata: python-stdlib\n"


def test_the_stages_of_reading_report_together() -> None:
    """A key, a type, a rule of the spec, two rules of the planner, a missing file and a silenced warning."""
    text = MODEL.replace("heads: 4", "heads: 4, kv_heads: 3") + CPU.replace("python-stdlib", "/none/*.txt")
    text += "training: {global_batch: 8}\ncheckpoint: {evry: 3}\noptimizer: {lr: fast}\n"
    text += "parallel: {recompute: [full], tensor: 3}\n"
    assert codes(text) == {"PT101", "PT102", "PT204", "PT267", "PT271", "PT601"}


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        # The number of steps is not known, so whether warm-up is longer is not known either.
        ("training: {stepz: 9}\noptimizer: {schedule: {warmup_steps: 5000}}\n", (), {"PT101"}),
        ("training: {steps: many}\noptimizer: {schedule: {warmup_steps: 5000}}\n", (), {"PT102"}),
        ("steps: 9\noptimizer: {schedule: {warmup_steps: 5000}}\n", (), {"PT101"}),
        ("trainign: {steps: 9}\noptimizer: {schedule: {warmup_steps: 5000}}\n", (), {"PT101"}),
        ("optimizer: {schedule: {warmup_steps: 5000}}\n", ("training.stepz=9",), {"PT101"}),
        ("optimizer: {schedule: {warmup_steps: 5000}}\n", ("training.steps=a: b: c",), {"PT107"}),
        # It is known here, and the batch is wrong.
        (
            "training: {steps: 9, global_batch: x}\noptimizer: {schedule: {warmup_steps: 5000}}\n",
            (),
            {"PT102", "PT213"},
        ),
        # A rule reads the default of a value that the file gives twice.
        ("training: {steps: 9}\ntraining: {steps: 9999}\noptimizer: {schedule: {warmup_steps: 5000}}\n", (), {"PT008"}),
    ],
)
def test_nothing_follows_from_a_stand_in(text: str, overrides: tuple[str, ...], expected: set[str]) -> None:
    assert codes(MODEL + CPU + text, *overrides) == expected


def test_a_section_that_cannot_do_without_a_value_is_left_out() -> None:
    experts = MODEL.replace("vocab: 256", "vocab: 256, moe: {experts: two, top_k: 1, ffn_hidden: 8}")
    assert codes(experts + CPU + "parallel: {expert: 2, recompute: [full]}\n") == {"PT102", "PT271"}
    assert codes("model: {layers: two}\n" + CPU + "parallel: {recompute: [full]}\ncheckpoint: {every: soon}\n") == {
        "PT102",
        "PT217",
    }


def test_a_refused_model_says_nothing_about_who_builds_it() -> None:
    assert codes("model: {hf: 3}\n" + CPU + "parallel: {sequence: {method: compiled, degree: 2}}\n") == {"PT102"}


def test_reads_are_recorded() -> None:
    spec = load_text(MODEL + CPU).spec
    assert spec is not None
    assert watched(spec) is spec
    assert independent(lambda: iter([]), *()) == []
    with standing_in(frozenset({("training", "steps")})):
        seen = watched(spec)
        assert isinstance(seen, Spec)
        for use, path in (
            (lambda: seen.training.steps, ("training", "steps")),
            (lambda: seen.model.moe, ("model", "moe")),
            (lambda: seen.training == spec.training, ("training", "steps")),
            (lambda: spec.training == seen.training, ("training", "steps")),
            (seen.training.model_dump, ("training", "steps")),
            (lambda: "steps" in seen.training.model_fields_set, ("training", "steps")),
            (lambda: seen.model_copy().limits.max_devices, ("limits", "max_devices")),
        ):
            with reading() as reads:
                use()
                assert path in (reads.reads or ())
        with reading() as reads:
            assert seen.training.global_batch
            assert reads.reads == {("training", "global_batch")}
        assert seen.training == spec.training
        assert seen.model_dump() == spec.model_dump()


def test_the_command_reports_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(MODEL + CPU + "optimizer: {lr: fast}\nparallel: {recompute: [full]}\n", encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        run(["plan", str(file)])
    assert ended.value.code == 1
    output = capsys.readouterr().err
    assert "PT102" in output
    assert "mine.yaml:5:23" in output  # the place of what the planner finds
    assert "PT271" in output
