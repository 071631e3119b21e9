"""The planner samples data files found on this machine: errors that would stop ranks are reported beforehand."""

from __future__ import annotations

import builtins
import errno
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from data_case import open_one, write_megatron, write_tokens
from planned import plan_of

from partool.diagnostics.record import Diagnostic
from partool.layout.parameters import count, parameters
from partool.plan.types import NOT_RUN
from partool.planner.resolve import resolve
from partool.planner.rules import data_size
from partool.planner.rules.data_sample import files_of
from partool.planner.rules.data_size import UncountedError, count_tokens
from partool.planner.rules.data_template import check_template
from partool.spec import load_text
from partool.spec.data import DataSpec

MODEL = "model: {layers: 2, hidden: 64, heads: 4, vocab: 256}\n"
HERE = MODEL + "hardware: {accelerator: cpu, per_node: 1}\n"
CLUSTER = MODEL + "hardware: {accelerator: h100-sxm, per_node: 1}\nlaunch: {target: slurm}\n"


def found(folder: Path, data: str, head: str = HERE) -> list[Diagnostic]:
    loaded = load_text(head + f"data: {data}\n")
    assert loaded.spec is not None, loaded.diagnostics
    return [one for one in resolve(loaded.spec, folder).diagnostics if one.code.startswith("PT6")]


def record(**fields: object) -> str:
    return json.dumps(fields) + "\n"


@pytest.mark.parametrize(
    ("name", "content", "code", "said"),
    [
        ("d/a.jsonl", record(text="a") + '{"text": "open}\n', "PT602", "a.jsonl:2 is not valid JSON"),
        ("d/a.jsonl", record(content="a"), "PT602", "has no key 'text' (its keys: content)"),
        ("d/a.jsonl", record(text=3), "PT602", "'text' is a int, not a string"),
        ("d/a.jsonl", "[1]\n", "PT602", "holds a list"),
        ("d/deep/a.ndjson", "\xff\xfe", "PT602", "is not valid JSON"),
        ("d/a.bin", "0000", "PT602", "has neither a sidecar a.json nor a Megatron index"),
        ("d/a.txt.gz", "0000", "PT602", ".gz files are not read"),
        ("d/.hidden", "text", "PT601", "there are no files to read in"),
        ("d/a.jsonl", "", "PT601", "all files in"),
        ("d/a.parquet", "no such file", "PT602", "is no Parquet file"),
    ],
)
def test_what_ranks_would_stop_at_is_found(tmp_path: Path, name: str, content: str, code: str, said: str) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    file = tmp_path / name
    file.parent.mkdir(parents=True)
    file.write_text(content, encoding="latin-1")
    for source, place in (("d", ("data", "source")), ("[python-stdlib, d]", ("data", "source", 1))):
        one = found(tmp_path, f"{{source: {source}}}")
        assert [(d.code, d.severity, d.path) for d in one] == [(code, "error", place)]
        assert said in one[0].message
    # It is here, so it is known wherever training runs, unless a mount puts other files at its path.
    assert [d.severity for d in found(tmp_path, "{source: d}", CLUSTER)] == ["error"]
    mount = f"slurm: {{container: pyxis}}, image: i.sqsh, mounts: [{{source: /elsewhere, target: {tmp_path}}}]"
    inside = CLUSTER.replace("slurm}", f"slurm, {mount}}}")
    assert [d.severity for d in found(tmp_path, "{source: d}", inside)] == ["note"]


def test_token_files_need_what_lies_beside_them(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(record(text="a"), encoding="utf-8")
    for format, beside in (("tokens", "a.json"), ("megatron", "a.idx")):
        (one,) = found(tmp_path, f"{{source: a.jsonl, format: {format}}}")
        assert (one.code, f"has no {beside} beside it" in one.message) == ("PT602", True)


SIDECAR = '{"dtype": "uint16", "count": 2, "vocab": 9, "documents": "a.docs"}'
HEADER = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 3)
INDEX = HEADER + struct.pack("<2i2q3q", 1, 2, 0, 2, 0, 1, 2)


@pytest.mark.parametrize(
    ("beside", "content", "tokens", "said"),
    [
        ("a.json", SIDECAR, b"\1\0\2", "a.bin has 3 bytes where 4 are expected (2 values of uint16)"),
        ("a.json", SIDECAR.replace("uint16", "int7"), b"\1\0\2\0", "a.json is not a sidecar of tokens"),
        ("a.json", "[]", b"\1\0\2\0", "a.json is not a sidecar of tokens"),
        ("a.json", SIDECAR.replace("2,", "1,", 1), b"\1\0", "a.docs: document offsets must go from 0"),
        ("a.idx", INDEX, b"\1\0\2\0\3", "a.bin has 5 bytes where 6 are expected (3 values of uint16)"),
        ("a.idx", INDEX[:-1], b"\1\0\2\0\3\0", "a.idx has 81 bytes where 82 are expected"),
        ("a.idx", b"no index", b"\1\0\2\0\3\0", "does not begin with MMIDIDX"),
        ("a.json", SIDECAR, b"\1\0\2\0", ""),
        ("a.idx", INDEX, b"\1\0\2\0\3\0", ""),
    ],
)
def test_token_files_are_as_long_as_what_lies_beside_them_says(
    tmp_path: Path, beside: str, content: str | bytes, tokens: bytes, said: str
) -> None:
    (tmp_path / beside).write_bytes(content.encode() if isinstance(content, str) else content)
    (tmp_path / "a.docs").write_bytes(struct.pack("<2q", 0, 2))
    (tmp_path / "a.bin").write_bytes(tokens)
    for head in (HERE, CLUSTER):
        one = found(tmp_path, "a.bin", head)
        assert [(d.code, d.severity) for d in one] == ([("PT602", "error")] if said else [])
        assert said in (one[0].message if one else "")


def test_text_for_a_tokenizer_is_utf_8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"gr\xfcn")
    (tmp_path / "cut.txt").write_bytes(
        b"x" * ((1 << 16) - 1) + "grün".encode()[2:]
    )  # a character across the sample's end
    vocabulary = {"model": {"vocab": {"a": 0}}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (one,) = found(tmp_path, "{source: a.txt, tokenizer: .}")
    assert (one.code, "a.txt is not UTF-8" in one.message) == ("PT602", True)
    assert found(tmp_path, "{source: a.txt}") == []
    assert found(tmp_path, "{source: cut.txt, tokenizer: .}") == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "d" / "inside").mkdir(parents=True)
    (tmp_path / "d" / "a.txt").write_text("text", encoding="utf-8")
    for locked in (tmp_path / "d" / "a.txt", tmp_path / "d" / "inside"):
        mode = locked.stat().st_mode
        locked.chmod(0)
        (one,) = found(tmp_path, "d")
        locked.chmod(mode)
        assert (one.code, "Permission denied" in one.message) == ("PT601", True)


def test_sound_data_are_none_of_it(tmp_path: Path) -> None:
    """No finding for records longer than the sample, blank lines, token files' companions, or later faults."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.jsonl").write_text(record(text="x" * 200_000) + "\n" + record(text="a"), encoding="utf-8")
    (tmp_path / "d" / "b.bin").write_bytes(b"\0\0")
    (tmp_path / "d" / "b.json").write_text('{"dtype": "uint16", "count": 1, "vocab": 9}', encoding="utf-8")
    (tmp_path / "d" / "c.txt").write_text("", encoding="utf-8")
    (tmp_path / "late.jsonl").write_text(record(text="a") * 50 + "{\n", encoding="utf-8")
    assert found(tmp_path, "d") == []
    assert found(tmp_path, "{source: d/*.jsonl, text_field: text}") == []
    assert found(tmp_path, "late.jsonl") == []


def test_a_name_that_no_file_system_takes_is_a_finding(tmp_path: Path) -> None:
    assert [one.code for one in found(tmp_path, "{source: " + "a" * 300 + "}")] == ["PT601"]
    assert [one.code for one in found(tmp_path, "{source: " + "a" * 300 + "/*.txt}")] == ["PT601"]


def test_parquet_is_sampled_and_its_column_named(tmp_path: Path) -> None:
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    parquet.write_table(pyarrow.table({"content": ["a", "b"], "n": [1, 2]}), tmp_path / "a.parquet")
    one = found(tmp_path, "a.parquet")
    assert [d.code for d in one] == ["PT602"]
    assert "a.parquet: row 1 has no key 'text' (its keys: content, n)" in one[0].message
    assert found(tmp_path, "{source: a.parquet, text_field: content}") == []
    assert "row 1: 'n' is a int" in found(tmp_path, "{source: a.parquet, text_field: n}")[0].message


def test_without_pyarrow_the_way_to_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    real = builtins.__import__

    def missing(name: str, *args: Any, **more: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    one = found(tmp_path, "a.parquet")
    assert [d.code for d in one] == ["PT602"]
    assert "pip install 'partool[parquet]'" in one[0].help


def test_tokens_are_counted_as_the_ranks_count_them(tmp_path: Path) -> None:
    (tmp_path / "data" / "deep").mkdir(parents=True)
    write_tokens(tmp_path / "data" / "a.bin", list(range(101)), dtype="uint32")
    write_megatron(tmp_path / "data" / "m.bin", [[[1, 2, 3], [4]], [[5, 6]]], code=4, dtype="<i4")
    (tmp_path / "data" / "deep" / "b.txt").write_text("twenty-one bytes here")
    (tmp_path / "data" / "deep" / "empty.txt").write_text("")
    (tmp_path / "data" / ".hidden.txt").write_text("left out")
    for source in ("data", "data/**/*", "data/a.bin", "data/deep"):
        data = DataSpec(
            source=[str(tmp_path / source), str(tmp_path / "data" / "a.bin")], cache=str(tmp_path / "cache")
        )
        with open_one(data, vocab=1000, sequence_length=3) as batches:
            assert count_tokens(data) == batches.train_tokens > 100
    data = DataSpec(source="python-stdlib", cache=str(tmp_path / "cache"))
    with open_one(data) as batches:
        assert count_tokens(data) == batches.train_tokens > 4e6


def test_tokens_that_nobody_can_count_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def why(**data: Any) -> str:
        with pytest.raises(UncountedError) as error:
            count_tokens(DataSpec(**data))
        return str(error.value)

    (tmp_path / "a.jsonl").write_text(record(text="a"), encoding="utf-8")
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    (tmp_path / "b.bin").write_bytes(b"1234")
    (tmp_path / "b.json").write_text("[]")
    assert "not tokenised yet" in why(source=str(tmp_path / "a.jsonl"))
    assert "not tokenised yet" in why(source=str(tmp_path / "a.txt"), tokenizer="folder")
    assert "b.bin cannot be read" in why(source=str(tmp_path / "b.bin"))
    assert "not on this machine" in why(source=str(tmp_path / "none" / "*.bin"))
    assert "not on this machine" in why(source=str(tmp_path / "none"))
    monkeypatch.setattr(data_size, "MOST_FILES", 1)
    assert "more than 1 files" in why(source=[str(tmp_path / "a.txt"), "python-stdlib"])


def test_one_source_that_is_elsewhere_leaves_the_tokens_unknown(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 999)
    here, elsewhere = str(tmp_path / "a.txt"), str(tmp_path / "none" / "*.bin")
    assert count_tokens(DataSpec(source=[here], tokenizer="bytes")) == 1000
    with pytest.raises(UncountedError, match="not on this machine"):
        count_tokens(DataSpec(source=[here, elsewhere], tokenizer="bytes"))


def test_folders_that_cannot_be_read_are_left_out_as_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system has ``lost+found``, which only root reads; the source itself must be readable."""
    (tmp_path / "data" / "lost+found").mkdir(parents=True)
    (tmp_path / "data" / "text").mkdir()
    (tmp_path / "data" / "text" / "a.txt").write_text("x" * 9)
    scan, refused = os.scandir, {str(tmp_path / "data" / "lost+found")}

    def scandir(path: str) -> Any:
        if str(path) in refused:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert [file.name for file in files_of(str(tmp_path / "data"))] == ["a.txt"]
    refused.add(str(tmp_path / "data"))
    with pytest.raises(PermissionError):
        list(files_of(str(tmp_path / "data")))
    with pytest.raises(UncountedError, match="Permission denied"):
        count_tokens(DataSpec(source=str(tmp_path / "data"), tokenizer="bytes"))


def test_a_plan_says_tokens_epochs_and_cost(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 999)
    head = MODEL + "hardware: {accelerator: cpu, per_node: 2, price_per_device_hour: 3.5}\n"
    head += "training: {steps: 10, global_batch: 4, sequence_length: 25}\n"
    plan = plan_of(head + "data: {source: a.txt, validation: 0.2}\n", folder=tmp_path)
    totals, hours = plan.prediction.totals, plan.prediction.time.device_hours
    assert totals is not None
    assert (totals.trained_tokens, totals.data_tokens, totals.data_unknown, totals.epochs) == (1000, 800, "", 1.25)
    assert (totals.price_per_device_hour, totals.cost) == (3.5, pytest.approx(3.5 * hours))
    assert totals.checkpoint_bytes == 12 * count(parameters(plan.model))
    for change in ("model.frozen=[layers.*]", "optimizer.name=lion", "training.precision=fp64"):
        other = plan_of(head + "data: {source: a.txt, pack: false}\n", change, folder=tmp_path).prediction.totals
        assert other is not None
        assert (other.data_tokens, other.epochs) == (1000, None)
        assert (other.checkpoint_bytes > totals.checkpoint_bytes) == ("fp64" in change)
        assert other.checkpoint_bytes != totals.checkpoint_bytes
    assert "prediction" in NOT_RUN  # prices and counted tokens do not change what runs


@pytest.mark.parametrize(
    ("tokenizer", "tokens", "path", "help"),
    [
        ("bytes", ["<a>"], ("data", "special_tokens"), "Hugging Face folder"),
        ("tok", ["<a>", "<b>", "<a>"], ("data", "special_tokens", 2), "drop one"),
        ("tok", ["<a> "], ("data", "special_tokens", 0), "write '<a>'"),
    ],
)
def test_special_tokens_that_cannot_be_added(
    tokenizer: str, tokens: list[str], path: tuple[str | int, ...], help: str
) -> None:
    data = DataSpec(source="a", records="chat", tokenizer=tokenizer, special_tokens=tokens, template="/no/template")
    (finding,) = [one for one in check_template(data, ("note", "")) if one.code == "PT632"]
    assert finding.path == path
    assert help in (finding.help or "")
