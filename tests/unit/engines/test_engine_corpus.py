"""Files of other training systems as people publish them become the runs that they are.

``tests/data/corpus/index.json`` has, for each file, where its settings are from, what the importer is told, and the
ranks and batches that follow by the engine's own rules; those were worked out by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from planned import plan_of

from partool.engines import Imported, Wanted, engine_of, read
from partool.engines.imported import spec_text

CORPUS = Path(__file__).parents[2] / "data" / "corpus"
ROWS: list[dict[str, Any]] = json.loads((CORPUS / "index.json").read_text())


def imported(row: dict[str, Any]) -> Imported:
    """Read a file with what the index says of it."""
    told, path = row["told"], CORPUS / row["file"]
    defined = "".join(f"{name}={value}; " for name, value in told.get("define", {}).items())
    names = ("accelerator", "nodes", "per_node", "model")
    wanted = Wanted(**{name: told.get(name) for name in names}, settings=told.get("set", {}))
    return read(path, defined + path.read_text(), row["engine"], wanted)


def at(spec: Any, path: str) -> Any:
    """Return the value at a path of a spec, or None."""
    for name in path.split("."):
        spec = spec.get(name) if isinstance(spec, dict) else None
    return spec


@pytest.fixture(scope="module")
def corpus() -> dict[str, Imported]:
    """All files, read once."""
    return {row["file"]: imported(row) for row in ROWS}


def test_the_index_has_every_file() -> None:
    files = {str(path.relative_to(CORPUS)) for kind in ("megatron", "deepspeed") for path in (CORPUS / kind).iterdir()}
    assert files == {row["file"] for row in ROWS}
    assert len(ROWS) >= 60
    assert sum(row["held_out"] for row in ROWS) == 20
    assert all(row["repo"].count("/") == 1 and row["path"] for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=[row["file"] for row in ROWS])
def test_ranks_and_batches_are_those_of_the_engine(row: dict[str, Any], corpus: dict[str, Imported]) -> None:
    spec = corpus[row["file"]].spec
    world = at(spec, "hardware.nodes") or 1
    world *= at(spec, "hardware.per_node") or 0
    names = ("parallel.micro_batch", "training.global_batch")
    assert [world, *(at(spec, name) for name in names)] == [row["world"], row["micro_batch"], row["global_batch"]]
    if row["data"] is not None:
        parts = ("parallel.tensor.degree", "parallel.pipeline.stages", "parallel.sequence.degree")
        ranks = world
        for part in parts:
            ranks //= at(spec, part) or 1
        assert ranks == row["data"]
        if row["accumulation"] is not None:
            assert row["micro_batch"] * row["accumulation"] * ranks == row["global_batch"]


@pytest.mark.parametrize("row", ROWS, ids=[row["file"] for row in ROWS])
def test_every_setting_has_a_fate(row: dict[str, Any], corpus: dict[str, Imported]) -> None:
    found = corpus[row["file"]]
    names = [fate.setting.name for fate in found.fates]
    assert len(names) == len(set(names)) > 0
    assert all(fate.text for fate in found.fates if fate.kind != "not understood")
    lines = len((CORPUS / row["file"]).read_text().splitlines())
    assert all(1 <= fate.setting.line <= lines for fate in found.fates)
    assert all(finding.code.startswith("PT82") and finding.help for finding in found.findings)


@pytest.mark.parametrize("row", ROWS, ids=[row["file"] for row in ROWS])
def test_values_of_settings_that_are_not_carried_stay_where_they_are(
    row: dict[str, Any], corpus: dict[str, Imported]
) -> None:
    found = corpus[row["file"]]
    text = spec_text(found, Path(row["file"]))
    values = {
        str(value)
        for fate in found.fates
        if fate.kind != "carried"
        for value in (fate.setting.value if isinstance(fate.setting.value, tuple) else (fate.setting.value,))
    }
    paths = {value for value in values if len(value) > 3 and any(letter in value for letter in "/$<")}
    assert not {value for value in paths if value in text}


def test_most_files_are_understood(corpus: dict[str, Imported]) -> None:
    """Shares only fall if a table forgets settings, or a script is read to another end."""
    fates = [fate for found in corpus.values() for fate in found.fates]
    known = sum(fate.kind != "not understood" for fate in fates)
    assert known / len(fates) > 0.95
    assert len(fates) > 2900


def test_every_argument_of_megatron_is_known() -> None:
    """The names are those of ``megatron/training/arguments.py`` in megatron-core 0.19.2."""
    names = (CORPUS.parent / "megatron_arguments.txt").read_text().split()
    run = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --micro-batch-size 1"
    unknown = set[str]()
    for name in names:
        found = read(Path("train.sh"), f"{run} --{name} 2", "megatron", Wanted("h100-sxm", 1, 1))
        unknown |= {fate.setting.name for fate in found.fates if fate.kind == "not understood"}
    assert len(names) > 800
    assert unknown == set()


def test_engines_show_in_their_files() -> None:
    for row in ROWS:
        assert engine_of((CORPUS / row["file"]).read_text()) == row["engine"], row["file"]


PLANNED = ("megatron/nvidia_mixtral_small.sh", "deepspeed/llamafactory_z2_autotp.json")


@pytest.mark.parametrize("name", PLANNED)
def test_specs_are_planned(name: str, corpus: dict[str, Imported]) -> None:
    plan = plan_of(spec_text(corpus[name], Path(name)))
    row = next(row for row in ROWS if row["file"] == name)
    assert (plan.engine, plan.training.global_batch) == (row["engine"], row["global_batch"])
    assert plan.prediction.time.step_time_s > 0
