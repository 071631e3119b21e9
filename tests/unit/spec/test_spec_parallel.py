"""The ``parallel`` section: shorthands, lists, and contradictions."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
import yaml

from partool.spec import load_text
from partool.spec.parallel import ParallelSpec
from partool.spec.runs import Runs, in_runs
from partool.spec.schema import json_schema

BASE = "model: {layers: 2, hidden: 64, heads: 4}\ndata: python-stdlib\n"


def parallel(text: str, overrides: list[str] | None = None) -> ParallelSpec:
    loaded = load_text(f"{BASE}parallel: {text}\n", overrides=overrides)
    assert loaded.spec is not None, loaded.diagnostics
    return loaded.spec.parallel


def test_everything_is_open_by_default() -> None:
    flat = ParallelSpec().model_dump()
    values = [inner for value in flat.values() for inner in (value.values() if isinstance(value, dict) else [value])]
    assert values.count({}) == 1  # patterns: none
    assert values.count(None) == 1  # offload.dir: no folder, so no files
    assert {value for value in values if value not in ({}, None)} == {"auto"}


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("{pipeline: 4}", "{pipeline: {stages: 4}}"),
        ("{pipeline: auto}", "{}"),
        ("{sequence: 2}", "{sequence: {degree: 2}}"),
        ("{sequence: auto, tensor: auto, expert: auto}", "{}"),
        ("{expert: {degree: 4}, expert_tensor: 2}", "{expert: 4, expert_tensor: 2}"),
        ("{expert: {degree: auto}}", "{}"),
        ("{offload: auto}", "{}"),
        ("{offload: none}", "{offload: {optimizer: none, parameters: none, activations: none}}"),
        ("{offload: cpu}", "{offload: {optimizer: cpu}}"),
    ],
)
def test_shorthands_stand_for_sections(text: str, full: str) -> None:
    assert parallel(text) == parallel(full)


def test_overrides_open_shorthands() -> None:
    found = parallel(
        "{pipeline: 4, sequence: 2}", ["parallel.pipeline.schedule=gpipe", "parallel.sequence.method=ring"]
    )
    assert (found.pipeline.stages, found.pipeline.schedule) == (4, "gpipe")
    assert (found.sequence.degree, found.sequence.method) == (2, "ring")
    assert parallel("{expert: 4}", ["parallel.expert.degree=2"]).expert == 2
    assert parallel("{expert: {degree: 4}}", ["parallel.expert=2"]).expert == 2
    found = parallel("{tensor: 2, offload: none}", ["parallel.tensor.overlap=none", "parallel.offload.activations=cpu"])
    assert (found.tensor.degree, found.tensor.overlap) == (2, "none")
    offload = found.offload
    assert (offload.optimizer, offload.parameters, offload.activations) == ("none", "none", "cpu")
    offload = parallel("{}", ["parallel.offload=nvme", "parallel.offload.dir=/nvme"]).offload
    assert (offload.optimizer, offload.parameters, offload.dir) == ("nvme", "auto", "/nvme")


def test_a_section_that_an_override_replaces_is_not_pointed_at() -> None:
    text = f"{BASE}parallel: {{offload: {{optimizer: nvme, dir: /tmp}}}}\n"
    (found,) = load_text(text, overrides=["parallel.offload=nvme"]).diagnostics
    assert found.code == "PT230"
    assert found.span is not None
    assert found.span.file == "--set parallel.offload=nvme"


def test_a_folder_that_nobody_writes_is_no_error() -> None:
    """An unused folder is allowed, so that one word switches a spec between files and none."""
    found = load_text(f"{BASE}parallel: {{offload: {{optimizer: cpu, dir: /nvme}}}}\n")
    assert found.spec is not None
    assert [(one.code, one.severity) for one in found.diagnostics] == [("PT231", "warning")]
    assert load_text(f"{BASE}parallel: {{offload: {{optimizer: cpu, buffers: 4}}}}\n").spec is None


def test_recompute_is_a_word_or_a_list() -> None:
    assert parallel("{recompute: attention}").recompute == "attention"
    assert parallel("{recompute: [none, full]}").recompute == ["none", "full"]


WRONG: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "zero degree": ("{tensor: 0}", "PT105", ("parallel", "tensor")),
    "word": ("{pipeline: four}", "PT105", ("parallel", "pipeline")),
    "a tier": ("{offload: disk}", "PT105", ("parallel", "offload")),
    "a tier without its folder": ("{offload: nvme}", "PT230", ("parallel", "offload", "optimizer")),
    "truth": ("{sequence: true}", "PT102", ("parallel", "sequence")),
    "policy": ("{recompute: [none, ful]}", "PT105", ("parallel", "recompute", 1)),
    "fraction": ("{offload: {gpu_fraction: 1.5}}", "PT105", ("parallel", "offload", "gpu_fraction")),
    "chunks": ("{pipeline: {schedule: 1f1b, chunks: 2}}", "PT223", ("parallel", "pipeline", "chunks")),
    "one chunk": ("{pipeline: {schedule: interleaved, chunks: 1}}", "PT223", ("parallel", "pipeline", "chunks")),
    "one stage": ("{pipeline: {stages: 1, chunks: 2}}", "PT223", ("parallel", "pipeline", "chunks")),
    "a V of three": ("{pipeline: {schedule: zb-v, chunks: 3}}", "PT223", ("parallel", "pipeline", "chunks")),
    "half a wave": ("{pipeline: {schedule: hanayo, chunks: 3}}", "PT223", ("parallel", "pipeline", "chunks")),
    "waves of 1f1b": ("{pipeline: {schedule: 1f1b, waves: 2}}", "PT436", ("parallel", "pipeline", "waves")),
    "waves of one stage": ("{pipeline: {stages: 1, waves: 2}}", "PT436", ("parallel", "pipeline", "waves")),
    "waves and chunks": (
        "{pipeline: {schedule: hanayo, waves: 2, chunks: 2}}", "PT436", ("parallel", "pipeline", "waves")
    ),
    "no bound": ("{pipeline: {schedule: gpipe, in_flight: 2}}", "PT436", ("parallel", "pipeline", "in_flight")),
    "waves of a file": (
        "{pipeline: {schedule: {file: my.csv}, waves: 2}}", "PT436", ("parallel", "pipeline", "waves")
    ),
    "few layers": (
        "{pipeline: {stages: 2, schedule: hanayo, waves: 1, layers: [1, 1, 2]}}", "PT431",
        ("parallel", "pipeline", "layers"),
    ),
    "halves and compiler": ("{compile: block, pipeline: {schedule: zb-v}}", "PT434", ("parallel", "compile")),
    "ring and compiler": ("{compile: block, pipeline: {schedule: weipipe}}", "PT435", ("parallel", "compile")),
    "ring and ZeRO": ("{data: {zero: 3}, pipeline: {schedule: weipipe}}", "PT435", ("parallel", "data", "zero")),
    "ring and recompute": ("{recompute: none, pipeline: {schedule: weipipe}}", "PT435", ("parallel", "recompute")),
    "share of nothing": (
        "{offload: {optimizer: none, gpu_fraction: 0.5}}", "PT224", ("parallel", "offload", "gpu_fraction")
    ),
    "whole parameters": (
        "{data: {zero: 1}, offload: {parameters: cpu}}", "PT224", ("parallel", "offload", "parameters")
    ),
    "parameters alone": (
        "{offload: {optimizer: none, parameters: cpu}}", "PT224", ("parallel", "offload", "parameters")
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "code", "path"), WRONG.values(), ids=WRONG)
def test_contradictions_are_found_at_their_place(text: str, code: str, path: tuple[Any, ...]) -> None:
    (found,) = load_text(f"{BASE}parallel: {text}\n").diagnostics
    assert (found.code, found.path) == (code, path)
    assert found.span is not None


def test_a_section_of_one_key_says_which() -> None:
    (finding,) = load_text(f"{BASE}parallel: {{expert: {{ranks: 4}}}}\n").diagnostics
    assert (finding.code, finding.message) == ("PT105", "`parallel.expert` has one key, `degree`")
    assert finding.help == "write expert: {degree: 4}, or expert: 4"


def test_the_schema_knows_the_shorthands() -> None:
    check = jsonschema.Draft7Validator(json_schema())
    base = {"model": "llama3-8b", "data": "python-stdlib"}
    words = [{"offload": word} for word in ("auto", "none", "cpu", "nvme")]
    for good in (
        *words,
        {"pipeline": 4},
        {"sequence": "auto"},
        {"tensor": 2},
        {"expert": 2},
        {"expert": {"degree": 2}},
        {"pipeline": {"stages": 2}},
        {"recompute": ["none", "full"]},
    ):
        assert list(check.iter_errors({**base, "parallel": good})) == [], good
    for bad in (
        {"pipeline": 0},
        {"sequence": "ring"},
        {"recompute": ["ful"]},
        {"offload": "disk"},
        {"expert": {"degree": 0}},
        {"expert": {"ranks": 2}},
        {"offload": {"optimizer": "disk"}},
    ):
        assert list(check.iter_errors({**base, "parallel": bad})), bad


def test_equal_entries_of_a_list_may_be_written_as_runs() -> None:
    words = ("[full × 2, none, selective x 2, 'none*3']", "['  full×1', full, none*1, selective × 2, none, none × 2]")
    wanted = ["full", "full", "none", "selective", "selective", "none", "none", "none"]
    for text in words:
        assert parallel(f"{{recompute: {text}}}").recompute == wanted
    assert parallel("{pipeline: {stages: 2, layers: [4 × 2]}}").pipeline.layers == [4, 4]
    assert parallel("{}", ["parallel.recompute=[full × 1, none x 1]"]).recompute == ["full", "none"]
    check = jsonschema.Draft7Validator(json_schema())
    document = yaml.safe_load(f"{BASE}parallel: {{recompute: {words[0]}, pipeline: {{layers: [4 × 2, 3]}}}}")
    assert list(check.iter_errors(document)) == []
    for values in ([1, 1, 1, 2, 2, 3], ["full", "none", "full"], [], [7] * 1000):
        runs = in_runs(values)
        assert Runs(type(values[0]) if values else str, r"\w+").expanded(runs) == values
    assert in_runs([1, 1, 1, 2, 2, 3]) == ["1 × 3", "2 × 2", 3]


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ("{recompute: [full × 3, ful × 5]}", ("parallel", "recompute", 1), "ful × 5"),
        ("{recompute: [full × 0]}", ("parallel", "recompute", 0), "full × 0"),
        ("{recompute: [full × 99999]}", ("parallel", "recompute", 0), "full × 99999"),
        ("{pipeline: {stages: 2, layers: [1, x × 2]}}", ("parallel", "pipeline", "layers", 1), "x × 2"),
    ],
)
def test_a_run_that_cannot_be_read_is_named_alone(text: str, place: tuple[Any, ...], said: str) -> None:
    (found,) = load_text(f"{BASE}parallel: {text}\n").diagnostics
    assert found.path == place
    assert said in found.message


HELPS: dict[str, tuple[str, str, str]] = {
    "no waves": ("{pipeline: {waves: 0}}", "greater than 0 or auto", "use 1 or more"),
    "a wave and a half": ("{pipeline: {waves: 1.5}}", "a whole number or auto", "use 1 or 2"),
    "less than one": ("{pipeline: {in_flight: 0.5}}", "a whole number or auto", "use 1 or more"),
    "nothing in flight": ("{pipeline: {in_flight: 0}}", "greater than 0 or auto", "use 1 or more"),
    "no layers": ("{pipeline: {layers: [0, 2]}}", "layers[0]` must be greater than 0", "use 1 or more"),
    "off": ("{pipeline: off}", "a whole number, a section with keys or auto", "use 1 for none"),
    "false": ("{pipeline: false}", "not false", "use 1 for none"),
    "no ranks": ("{tensor: 0}", "greater than 0, a section with keys or auto", "use 1 for none"),
    "a near tier": ("{offload: nvm}", "must be a section with keys, none, cpu, nvme or auto", "did you mean `nvme`?"),
    "no": ("{offload: {speculate: no}}", "must be true or false, undo or auto, not 'no'", "did you mean `false`?"),
    "a near word": ("{recompute: ful}", "not 'ful'", "did you mean `full`?"),
    "true": ("{pipeline: {waves: true}}", "not true", ""),
}


@pytest.mark.parametrize(("text", "message", "help"), HELPS.values(), ids=HELPS)
def test_numbers_that_cannot_be_are_told_which_can(text: str, message: str, help: str) -> None:
    (found,) = load_text(f"{BASE}parallel: {text}\n").diagnostics
    assert message in found.message
    assert found.help == help
