"""Sources, file formats, splits and the errors of broken files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from data_case import open_one, stream, write_megatron, write_tokens

from partool.plan.packing import choose
from partool.spec.data import DataSpec
from partool_runtime.errors import ConfigurationError
from partool_runtime.tokens.opening import files_of


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTOOL_CACHE", str(tmp_path / "cache"))


def refused(code: str, data: DataSpec, **settings: object) -> str:
    def read() -> None:
        with open_one(data, **settings) as batches:
            for step in range(10):
                batches.step(step)

    with pytest.raises(ConfigurationError) as caught:
        read()
    assert caught.value.code == code
    return str(caught.value)


def names(source: str | list[str], **settings: object) -> list[str]:
    return [file.path.name for file in files_of(DataSpec(source=source, **settings))]


# Sources


def test_sources_in_the_order_given_sorted_within_and_none_twice(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/10.txt", "b/c/1.md", "b/.hidden", "b/.git/x", "a.txt", "[odd].txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    assert names(f"{tmp_path}/b") == ["10.txt", "2.txt", "1.md"]
    assert names([f"{tmp_path}/b/2.txt", f"{tmp_path}/**/*.txt"]) == ["2.txt", "[odd].txt", "a.txt", "10.txt"]
    assert names(f"{tmp_path}/[odd].txt") == ["[odd].txt"]
    assert names(f"{tmp_path}/b/**/*.md") == ["1.md"]


def test_companions_are_not_data_of_their_own(tmp_path: Path) -> None:
    write_tokens(tmp_path / "t.bin", [1, 2], documents="t.documents.bin")
    np.array([0, 2], dtype="<i8").tofile(tmp_path / "t.documents.bin")
    write_megatron(tmp_path / "m.bin", [[[1, 2]]])
    (tmp_path / "alone.json").write_text("{}")
    files = files_of(DataSpec(source=str(tmp_path)))
    assert [(file.path.name, file.format) for file in files] == [
        ("alone.json", "text"),
        ("m.bin", "megatron"),
        ("t.bin", "tokens"),
    ]


def test_missing_files_are_named_together(tmp_path: Path) -> None:
    (tmp_path / "there.txt").write_text("x" * 50)
    (tmp_path / "empty").mkdir()
    write_megatron(tmp_path / "m.bin", [[[1, 2]]])
    sources = [f"{tmp_path}/there.txt", f"{tmp_path}/no.txt", f"{tmp_path}/*.nothing", f"{tmp_path}/empty"]
    message = refused("PT601", DataSpec(source=sources))
    assert all(name in message for name in ("no.txt", "*.nothing", "/empty"))
    assert "there.txt" not in message
    assert "only indexes" in refused("PT601", DataSpec(source=f"{tmp_path}/*.idx"))
    assert "empty list" in refused("PT601", DataSpec(source=[]))
    os.mkfifo(tmp_path / "pipe")
    assert "regular" in refused("PT601", DataSpec(source=f"{tmp_path}/pipe"))
    (tmp_path / "x.jsonl.gz").write_text("x")
    assert "unpack" in refused("PT602", DataSpec(source=f"{tmp_path}/x.jsonl.gz"))


def test_python_stdlib_is_plausible_and_stable() -> None:
    files = files_of(DataSpec(source="python-stdlib"))
    paths = [str(file.path) for file in files]
    assert paths == sorted(paths, key=Path)
    assert all(path.endswith(".py") for path in paths)
    assert not [path for path in paths if {"test", "tests", "site-packages", "idle_test"} & set(Path(path).parts)]
    assert {"argparse.py", "ast.py", "zipimport.py"} <= {Path(path).name for path in paths}
    assert 4 << 20 < sum(file.size_bytes for file in files) < 40 << 20


# Text and JSONL


def test_bytes_of_any_kind_become_documents_that_end_in_zero(tmp_path: Path) -> None:
    contents = [b"\xff\xfe\x00\x80 latin \xe9", b"", bytes(range(256)) * 2, b"end", b""]
    for index, content in enumerate(contents):
        (tmp_path / f"{index}.txt").write_bytes(content)
    with open_one(DataSpec(source=str(tmp_path / "*.txt")), sequence_length=1) as batches:
        assert bytes(stream(batches)) == b"".join(content + b"\x00" for content in contents if content)
        assert batches.vocab == 256
        assert batches.train_tokens == sum(map(len, contents)) + 3
        assert batches.validation_tokens == 0
        assert list(batches.validation()) == []


def test_long_text_is_cut_into_pieces_and_joined_without_loss(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("partool_runtime.tokens.documents.PIECE_BYTES", 11)
    content = "a\nλόγος 😀😀😀\n\nno line break for a while: ".encode() + b"\x80" * 40 + b"\n"
    (tmp_path / "long.txt").write_bytes(content)
    with open_one(DataSpec(source=str(tmp_path / "long.txt")), sequence_length=1) as batches:
        assert bytes(stream(batches)) == content + b"\x00"


def test_jsonl_records_are_documents_and_blank_lines_nothing(tmp_path: Path) -> None:
    lines = [
        '{"body": "one"}',
        "",
        '  {"body": "zwölf\\u2028", "x": 1}  ',
        "   ",
        '{"body": ""}',
        '{"body": "\\ud800"}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "b.txt").write_text("text too")
    data = DataSpec(source=[f"{tmp_path}/a.jsonl", f"{tmp_path}/b.txt"], text_field="body")
    with open_one(data, sequence_length=1) as batches:
        assert bytes(stream(batches)) == b"one\0" + "zwölf\u2028".encode() + b"\0\xed\xa0\x80\0text too\0"


def test_records_without_text_are_told_of_by_every_run(tmp_path: Path) -> None:
    texts = ["one", "", "two", "", ""]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "b.txt").write_text("")  # an empty file has no documents
    data = DataSpec(source=[f"{tmp_path}/a.jsonl", f"{tmp_path}/b.txt"], cache=str(tmp_path / "cache"))
    for _ in range(2):  # the second opening finds the cache
        with open_one(data, sequence_length=1) as batches:
            assert bytes(stream(batches)) == b"one\0two\0"
            (note,) = batches.notes
            assert note.startswith("PT693: 3 documents hold no text")
            assert note.endswith(f"the first is {tmp_path}/a.jsonl:2")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}')
    with open_one(data, sequence_length=1) as batches:
        assert batches.notes == ()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"text": "x"', "not valid JSON"),
        ("[1]", "a list, not a JSON object"),
        ('{"txt": "x"}', "no key 'text' (its keys: txt)"),
        ('{"text": 3}', "a int, not a string"),
        ("\udcff", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_malformed_record_is_named_by_file_and_line(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n", encoding="utf-8", errors="surrogateescape")
    message = refused("PT602", DataSpec(source=str(path)))
    assert f"{path}:3" in message
    assert says in message
    assert {entry.suffix for entry in (tmp_path / "cache").iterdir()} == {".lock", ".failed"}


def test_too_little_data_says_what_would_fit(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("seven")
    assert "at most 5" in refused("PT604", DataSpec(source=str(path)), sequence_length=6)
    with open_one(DataSpec(source=str(path)), sequence_length=5) as batches:
        assert batches.samples_per_epoch == 1
        assert len(batches.step(3)) == 6
    path.write_text("")
    refused("PT604", DataSpec(source=str(path)))
    refused("PT604", DataSpec(source=str(path), validation=0.5))
    refused("PT604", DataSpec(source=str(path), pack=False))
    path.write_text("enough for training, but not for a share of it")
    refused("PT604", DataSpec(source=str(path), validation=0.01))
    refused("PT604", DataSpec(source=str(path), validation=0.5, pack=False))


# Token files


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_files_with_sidecars(tmp_path: Path, dtype: str) -> None:
    first = write_tokens(tmp_path / "a.bin", [5, 6, 7, 999], dtype=dtype)
    second = write_tokens(tmp_path / "b.bin", [1, 2, 3], dtype=dtype, vocab=70_000, documents="b.documents.bin")
    write_tokens(tmp_path / "none.bin", [], dtype=dtype)
    np.array([0, 1, 1, 3], dtype="<i8").tofile(tmp_path / "b.documents.bin")
    sources = [str(first), str(tmp_path / "none.bin"), str(second)]
    with open_one(DataSpec(source=sources), vocab=70_000, sequence_length=2) as batches:
        assert stream(batches) == [5, 6, 7, 999, 1, 2, 3]
        assert batches.vocab == 70_000
    with open_one(DataSpec(source=sources, pack=False), vocab=70_000, sequence_length=2) as batches:
        assert [batches._train.row(i).tolist() for i in range(2)] == [[5, 6, 7], [2, 3, -1]]
        assert batches.samples_per_epoch == 2


def test_tokens_and_text_mix(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.bin", [5, 6], vocab=256)
    (tmp_path / "b.txt").write_text("AB")
    with open_one(DataSpec(source=str(tmp_path / "*.*")), sequence_length=1) as batches:
        assert stream(batches) == [5, 6, 65, 66, 0]


def test_text_and_tokens_are_read_in_the_order_given(tmp_path: Path) -> None:
    for name, tokens in (("first", [1, 2]), ("last", [8, 9])):
        write_tokens(tmp_path / f"{name}.bin", tokens, vocab=256)
    for name in "AB":
        (tmp_path / f"{name}.txt").write_text(name)
    sources = [f"{tmp_path}/{name}" for name in ("first.bin", "A.txt", "B.txt", "last.bin")]
    cache = str(tmp_path / "cache")
    with open_one(DataSpec(source=sources, cache=cache), sequence_length=1) as batches:
        assert stream(batches) == [1, 2, 65, 0, 66, 0, 8, 9]
    apart = [sources[place] for place in (2, 0, 1, 3)]
    with open_one(DataSpec(source=apart, cache=cache), sequence_length=1) as batches:
        assert stream(batches) == [66, 0, 1, 2, 65, 0, 8, 9]
        fingerprint = batches.fingerprint
    with open_one(DataSpec(source=apart[::-1], cache=cache), sequence_length=1) as batches:
        assert batches.fingerprint != fingerprint


def test_broken_token_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    data = DataSpec(source=str(path))
    path.write_bytes(b"1234")
    assert "neither a sidecar" in refused("PT602", data)
    assert "a.json" in refused("PT602", DataSpec(source=str(path), format="tokens"))
    for sidecar in ("", "[]", "{}", '{"dtype": "float16", "count": 2, "vocab": 9}', '{"dtype": "uint16", "vocab": 9}'):
        path.with_suffix(".json").write_text(sidecar)
        assert "is not a sidecar" in refused("PT602", data)
    for count in (1, 3, -1):
        path.with_suffix(".json").write_text(json.dumps({"dtype": "uint16", "count": count, "vocab": 9}))
        assert "4 bytes where" in refused("PT602", data)
    for offsets in ([0, 3], [1, 2], [], [0, 2, 1, 2], None):
        write_tokens(path, [1, 2], vocab=9, documents="a.documents.bin")
        if offsets is not None:
            np.array(offsets, dtype="<i8").tofile(tmp_path / "a.documents.bin")
        else:
            (tmp_path / "a.documents.bin").unlink()
        assert "offsets" in refused("PT602", data)


def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "a.bin", list(range(50, 80)), vocab=80)
    assert "set model.vocab to 80" in refused("PT605", DataSpec(source=str(path)), vocab=79)
    write_tokens(path, list(range(50, 80)), vocab=60)
    assert "at least 80" in refused("PT605", DataSpec(source=str(path)), vocab=79, sequence_length=29, global_batch=1)
    write_megatron(tmp_path / "m.bin", [[[1, -2, 3]]], code=4, dtype="<i4")
    assert "token -2" in refused("PT605", DataSpec(source=f"{tmp_path}/m.bin"), sequence_length=2)
    (tmp_path / "t.txt").write_text("text")
    assert "256 tokens" in refused("PT605", DataSpec(source=f"{tmp_path}/t.txt"), vocab=255)


@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4"), (5, "<i8"), (1, "u1"), (3, "<i2")])
def test_megatron_files(tmp_path: Path, code: int, dtype: str) -> None:
    path = write_megatron(tmp_path / "m.bin", [[[1, 2, 3], [4]], [[5, 6]], []], code=code, dtype=dtype)
    with open_one(DataSpec(source=str(path)), sequence_length=1) as batches:
        assert stream(batches) == [1, 2, 3, 4, 5, 6]
        assert batches.vocab == 256
    with open_one(DataSpec(source=str(path), pack=False), sequence_length=4) as batches:
        assert [batches._train.row(i).tolist() for i in range(2)] == [[1, 2, 3, 4, -1], [5, 6, -1, -1, -1]]


def test_broken_megatron_files_are_refused(tmp_path: Path) -> None:
    path, index = tmp_path / "m.bin", tmp_path / "m.idx"
    data = DataSpec(source=str(path), format="megatron")

    def broken(change: bytes | slice, at: int = 0, **settings: object) -> str:
        write_megatron(path, [[[1, 2, 3]], [[4]]], **settings)
        content = bytearray(index.read_bytes())
        if isinstance(change, slice):
            content = content[change]
        else:
            content[at : at + len(change)] = change
        index.write_bytes(content)
        return refused("PT602", data)

    assert "does not begin with MMIDIDX" in broken(b"X")
    assert "does not begin with MMIDIDX" in broken(slice(0, 20))
    assert "version 2" in broken(b"", version=2)
    assert "dtype code 7" in broken(b"", code=7)
    assert "bytes where" in broken(slice(0, -1))
    assert "bytes where" in broken(b"\xff" * 8, at=18)
    assert "without gaps" in broken(b"\x07", at=34 + 8)
    assert "without gaps" in broken(b"\xff\xff\xff\xff", at=34)
    assert "offsets" in broken(b"\x01", at=34 + 24)
    write_megatron(path, [[[1, 2, 3]], [[4]]])
    path.write_bytes(path.read_bytes()[:-1])
    assert "7 bytes where 8" in refused("PT602", data)
    index.unlink()
    assert "has no m.idx beside it" in refused("PT602", data)


# Samples


def test_unpacked_documents_are_cut_or_padded_with_ignored_labels(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("abcdefgh", "x", "yz")))
    with open_one(DataSpec(source=f"{tmp_path}/a.jsonl", pack=False), sequence_length=4, global_batch=3) as batches:
        rows = {tuple(batch.tokens_BS[0].tolist()): tuple(batch.labels_BS[0].tolist()) for batch in batches.step(0)}
    assert rows == {
        (97, 98, 99, 100): (98, 99, 100, 101),
        (120, 0, 0, 0): (0, -100, -100, -100),
        (121, 122, 0, 0): (122, 0, -100, -100),
    }


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_validation_documents_are_no_training_documents(tmp_path: Path, share: float, pack: bool) -> None:
    """Every token of document d is d, so that each sample shows its documents."""
    lengths = [3 + (7 * d) % 5 for d in range(100)]
    tokens = [d for d, length in enumerate(lengths) for _ in range(length)]
    offsets = np.cumsum([0, *lengths], dtype="<i8")
    offsets.tofile(tmp_path / "a.documents.bin")
    write_tokens(tmp_path / "a.bin", tokens, vocab=100, documents="a.documents.bin")
    data = DataSpec(source=f"{tmp_path}/a.bin", validation=share, pack=pack)
    with open_one(data, seed=1, sequence_length=2) as one, open_one(data, seed=2, sequence_length=2) as two:
        train = {int(t) for i in range(one._train.count) for t in one._train.row(i)} - {-1}
        held = {int(t) for i in range(one._validation.count) for t in one._validation.row(i)} - {-1}
        again = {int(t) for i in range(two._validation.count) for t in two._validation.row(i)} - {-1}
        kept = lengths if pack else [min(length, 3) for length in lengths]
        assert one.train_tokens + one.validation_tokens == sum(kept)
        assert one.fingerprint != two.fingerprint
    assert train | held == set(range(100))
    assert not train & held
    assert len(held) == int(100 * share)
    assert max(held) - min(held) > 40
    assert held == again


def test_one_long_document_gives_its_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 200)))
    data = DataSpec(source=f"{tmp_path}/a.txt", validation=0.1)
    with open_one(data, sequence_length=7, validation=9) as batches:
        assert (batches.train_tokens, batches.validation_tokens) == (180, 20)
        labels = [label for batch in batches.validation() for label in batch.labels_BS.flatten().tolist()]
        assert [label for label in labels if label != -100] == [*range(182, 200), 0]
        assert stream(batches) == list(range(1, 177))


@pytest.mark.parametrize(("count", "strata"), [(1, 0), (1, 1), (10, 3), (1000, 20), (49, 49)])
def test_chosen_documents_are_one_of_each_stretch(count: int, strata: int) -> None:
    chosen = choose(count, strata)
    edges = [k * count // max(strata, 1) for k in range(strata + 1)]
    assert all(low <= number < high for low, number, high in zip(edges, chosen, edges[1:], strict=False))
    assert len(chosen) == strata


def test_fingerprint_follows_content_and_order_not_place(tmp_path: Path) -> None:
    def fingerprint(name: str, content: str = "some text to train on", **settings: object) -> str:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "a.txt").write_text(content)
        pack = bool(settings.pop("pack", True))
        with open_one(DataSpec(source=str(folder), pack=pack), **settings) as batches:
            return batches.fingerprint

    first = fingerprint("a")
    assert fingerprint("b") == first
    assert fingerprint("b", micro_batch=3) == first
    others = [
        fingerprint("c", "some text to train on!"),
        fingerprint("d", "some text to train oN"),
        fingerprint("b", seed=1),
        fingerprint("b", sequence_length=6),
        fingerprint("b", global_batch=12),
        fingerprint("b", pack=False),
    ]
    assert len({first, *others}) == 7


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    """The tokens equal those of the same texts in JSONL; a row without text is reported like any empty record."""
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    texts = ["first row", "", "Üñî", "x" * 40] * 100
    parquet.write_table(pyarrow.table({"body": texts}), tmp_path / "a.parquet", row_group_size=7)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    settings = {"text_field": "body", "cache": str(tmp_path / "cache")}
    rows = open_one(DataSpec(source=str(tmp_path / "a.parquet"), **settings))
    lines = open_one(DataSpec(source=str(tmp_path / "b.jsonl"), **settings))
    assert stream(rows) == stream(lines)
    assert rows.notes[0].startswith("PT693: 100 documents")
    parquet.write_table(pyarrow.table({"body": ["a", None]}), tmp_path / "c.parquet")
    with pytest.raises(ConfigurationError, match="row 2: 'body' is a NoneType") as caught:
        open_one(DataSpec(source=str(tmp_path / "c.parquet"), **settings))
    assert caught.value.code == "PT602"
