"""The planner samples data files found on this machine: errors that would stop ranks are reported beforehand."""

from __future__ import annotations

import builtins
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from partool.diagnostics.record import Diagnostic
from partool.planner.resolve import resolve
from partool.spec import load_text

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
    assert "has no column 'text' (its columns: content, n)" in one[0].message
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
