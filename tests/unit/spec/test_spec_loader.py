"""The loader: every kind of bad file is reported at its place, and nothing is ever raised."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partool.spec import load, load_text
from partool.spec._yaml import resolve

QUICKSTART = (Path(__file__).parents[3] / "specs" / "quickstart.yaml").read_text(encoding="utf-8")
SMALL = "model: llama3-8b\ndata: python-stdlib\n"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(['*' + old] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
PIECES = [
    "{",
    "}",
    "[",
    "]",
    "&a ",
    "*a",
    "- ",
    "---\n",
    "\t",
    "!!int ",
    '"',
    "'",
    "1e999",
    "9" * 500,
    "\0",
    "é",
    "|\n",
]
PIECES += ["<<: ", "? ", ": ", "#", "%YAML 1.1\n", "!x ", ".nan", "\u2028", "\ud800", "true: 1\n", "~", "`", "\ufeff"]


def codes(text: str, **more: list[str]) -> list[tuple[str, int, int]]:
    found = load_text(text, **more).diagnostics
    return [(d.code, d.span.line, d.span.column) for d in found if d.span]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [("PT005", 1, 1)]),
        ("# only this\n", [("PT005", 1, 1)]),
        ("- model: a\n", [("PT007", 1, 1)]),
        ("word", [("PT007", 1, 1)]),
        ("model: {preset: a\ndata: b\n", [("PT006", 2, 5)]),
        ("model:\n\tpreset: a\n", [("PT006", 2, 1)]),
        (SMALL + "---\n" + SMALL, [("PT010", 4, 1)]),
        (SMALL + "data: again\n", [("PT008", 3, 1)]),
        (SMALL + "? [a]\n: 1\n", [("PT011", 3, 3)]),
        ("model: &a {b: *a}\n", [("PT009", 1, 8)]),
        ("mo\0del: a", [("PT006", 1, 3)]),
        (SMALL + "optimizer: {lr: .inf}\n", [("PT104", 3, 17)]),
        (SMALL + "training: {seed: 99999999999999999999}\n", [("PT104", 3, 18)]),
        (SMALL + "name: a\ud800", [("PT004", 3, 8)]),
    ],
)
def test_bad_files(text: str, expected: list[tuple[str, int, int]]) -> None:
    assert codes(text) == expected


@pytest.mark.parametrize(
    "change",
    [
        "parallel.tensor=1000000000", "model.heads=2147483647", "model.vocab=9007199254740993",
        "model.hidden=9007199254740992", "model.ffn_hidden=9223372036854775807", "parallel.offload.pinned_gib=1e300",
        "training.sequence_length=9007199254740992", "parallel.micro_batch=1e30", "parallel.sequence=1000000000000",
        "model.moe={experts: 10000000000, top_k: 1, ffn_hidden: 8}", "optimizer.lr=1e300", "checkpoint.keep=1e18",
        "launch.shutdown_timeout_s=1000000000000", "launch.same_failure=4611686018427387904",
    ],
)  # fmt: skip
def test_numbers_beyond_anything_built_are_refused_at_once(change: str) -> None:
    """Also tests the largest allowed value; kv_heads is set for rules that would count up to the number of heads."""
    fields = "model: {layers: 2, hidden: 64, heads: 4, kv_heads: 2, vocab: 256}\ndata: python-stdlib\n"
    found = load_text(fields, overrides=[change]).diagnostics
    assert found[0].code in ("PT102", "PT104", "PT105"), found
    assert all(one.code in ("PT102", "PT104", "PT105") for one in found), found


def test_a_bound_is_said_in_full() -> None:
    found = load_text(SMALL, overrides=["model.heads=2147483647"]).diagnostics
    assert [one.message for one in found] == ["`model.heads` must be at most 10,000, not 2147483647"]


def test_a_glob_without_quotes_is_told_of_them() -> None:
    (one,) = load_text("model: {layers: 2}\ndata: {source: *.jsonl}\n").diagnostics
    assert (one.code, one.help) == ("PT006", "quote a value that begins with `*`, such as a glob: '*.jsonl'")


def test_an_alias_bomb_is_refused_and_an_honest_alias_is_not() -> None:
    assert [code for code, *_ in codes(BOMB)] == ["PT009"]
    # PyYAML from 6.0.4 on stops reading by itself, at another place.
    assert [code for code, *_ in codes("[" * 50_000)] == ["PT009"]
    loaded = load_text(
        "model: &m {preset: llama3-8b}\ndata: {source: &s [a, b], cache: &c /x}\ncheckpoint: {dir: *c}\n"
    )
    assert loaded.diagnostics == []
    assert loaded.spec is not None
    assert loaded.spec.checkpoint.dir == "/x"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "large.yaml").write_bytes(b"#" * 1_000_001)
    (tmp_path / "latin.yaml").write_bytes(b"model: a\nname: \xff\n")
    found = {name: load(tmp_path / name).diagnostics for name in ("larg.yaml", ".", "large.yaml", "latin.yaml", "a\0")}
    assert [d[0].code for d in found.values()] == ["PT001", "PT002", "PT003", "PT004", "PT002"]
    assert "large.yaml" in found["larg.yaml"][0].help
    span = found["latin.yaml"][0].span
    assert span is not None
    assert (span.line, span.column) == (2, 7)


def test_all_findings_come_in_one_run_in_the_order_of_the_file() -> None:
    text = "model: {layerz: 3}\nhardware: {per_node: '2'}\ntraining: {steps: 0, precision: bf-16}\nzero: 1\ndata: x\n"
    found = load_text(text).diagnostics
    assert [d.code for d in found] == ["PT101", "PT105", "PT104", "PT105", "PT101"]
    assert "`layers`" in found[0].help
    assert "`bf16`" in found[3].help
    assert "parallel.data" in found[4].help


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on", "on"),
        ("no", "no"),
        ("yes", "yes"),
        ("1e-4", 1e-4),
        ("1:30:00", "1:30:00"),
        ("0777", 777),
        ("0o17", 15),
        ("0x1F", 31),
        ("~", None),
        ("", None),
        ("-.inf", -math.inf),
        ("1_000", "1_000"),
        ("2001-01-01", "2001-01-01"),
        ("True", True),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    found = resolve(text)
    assert found == value
    assert type(found) is type(value)


def test_overrides() -> None:
    loaded = load_text(
        SMALL, overrides=["model.layers=2", "optimizer.lr=1e-4", "launch.env.A='1'", "data.source=[a, b]"]
    )
    assert loaded.diagnostics == []
    spec = loaded.spec
    assert spec is not None
    assert (spec.model.preset, spec.model.layers, spec.optimizer.lr) == ("llama3-8b", 2, 1e-4)
    assert (spec.launch.env, spec.data.source) == ({"A": "1"}, ["a", "b"])
    for override in ("training.step=3", "training.steps", "=", "a.b.c=1", "training.steps={", "training.steps=x"):
        found = load_text(SMALL, overrides=[override]).diagnostics
        assert found, override
        assert all(d.span is not None and "--set" in d.span.file for d in found), override
    assert "`steps`" in load_text(SMALL, overrides=["training.step=3"]).diagnostics[0].help


def test_a_comment_silences_a_warning_and_no_error() -> None:
    text = SMALL + "optimizer: {betas: [0.9, 1.0]}  # partool: ignore[PT216]\n"
    assert [code for code, *_ in codes(text)] == ["PT216"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(QUICKSTART)), st.integers(0, 40), st.sampled_from(PIECES)), max_size=5))
def test_mutated_specs_never_raise(edits: list[tuple[int, int, str]]) -> None:
    text = QUICKSTART
    for at, length, piece in edits:
        text = text[:at] + piece + text[at + length :]
    loaded = load_text(text)
    assert loaded.spec is not None or loaded.diagnostics
    assert all(d.span is not None for d in loaded.diagnostics)


@settings(max_examples=100, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda text: text.encode())))
def test_any_bytes_never_raise(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(content)
    loaded = load(path)
    assert loaded.spec is not None or loaded.diagnostics


def test_a_pipe_is_refused_and_a_large_file_is_not_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    assert [finding.code for finding in load(pipe).diagnostics] == ["PT002"]  # reading it would wait for ever
    large = tmp_path / "large.yaml"
    with large.open("wb") as file:
        file.truncate(2**40)  # a hole of a tebibyte: reading it would fail
    assert [finding.code for finding in load(large).diagnostics] == ["PT003"]


def test_combinations_are_checked_in_the_sections_that_are_sound() -> None:
    sound = "model: {layers: 2, hidden: 63, heads: 4}\ndata: python-stdlib\ncheckpoint: {every: soon}\n"
    found = load_text(sound + "optimizer: {lr: fast}\n").diagnostics
    assert [finding.code for finding in found] == ["PT205", "PT217", "PT102"]
    found = load_text("checkpoint: {every: soon}").diagnostics
    assert [finding.code for finding in found] == ["PT103", "PT103", "PT217"]


@pytest.mark.parametrize(
    ("override", "help"),
    [
        ("kernels.tuned=nowhere", "in brackets it is a list: [nowhere]"),
        ("kernels.fused=norm", "in brackets it is a list: [norm]"),
        ("kernels.fused=none", "use [] for none"),
    ],
)
def test_a_single_value_in_a_lists_place_is_helped(override: str, help: str) -> None:
    text = "model: {layers: 2, hidden: 64, heads: 4, vocab: 256}\nhardware: {accelerator: cpu, per_node: 1}\n"
    (finding,) = load_text(text + "data: python-stdlib\n", overrides=[override]).diagnostics
    assert finding.help == help


def test_a_fused_part_counts_once() -> None:
    text = "model: {layers: 2, hidden: 64, heads: 4, vocab: 256}\nhardware: {accelerator: cpu, per_node: 1}\n"
    spec = load_text(text + "data: python-stdlib\n", overrides=["kernels.fused=[norm, glu, norm]"]).spec
    assert spec is not None
    assert spec.kernels.fused == ["norm", "glu"]
