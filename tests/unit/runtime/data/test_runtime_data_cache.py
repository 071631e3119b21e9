"""The token cache: built once, completely or not at all, repaired when broken; memory stays bounded."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from data_case import open_one, plan, stream, write_tokens

from partool.plan.token_cache import cache_folder
from partool.spec.data import DataSpec
from partool_runtime.data import open_data
from partool_runtime.errors import ConfigurationError
from partool_runtime.tokens import cache, writer


def source(tmp_path: Path, text: str = "the quick brown fox") -> DataSpec:
    (tmp_path / "a.txt").write_text(text)
    return DataSpec(source=str(tmp_path / "a.txt"), cache=str(tmp_path / "cache"))


def folders(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def counted_builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    built: list[Path] = []
    build = cache.TokenCache._build
    monkeypatch.setattr(cache.TokenCache, "_build", lambda cache, to: (built.append(to), build(cache, to))[1])
    return built


def test_a_second_run_finds_the_cache_and_a_changed_file_does_not(tmp_path: Path, monkeypatch) -> None:
    built = counted_builds(monkeypatch)
    data = source(tmp_path)
    for _ in range(2):
        with open_one(data) as batches:
            assert bytes(stream(batches)).startswith(b"the quick bro")
    assert len(built) == 1
    with open_one(source(tmp_path, "now something else")) as batches:
        assert bytes(stream(batches)).startswith(b"now something")
    os.utime(tmp_path / "a.txt", ns=(0, 0))
    open_one(data).close()
    assert len(built) == 3
    assert len(folders(tmp_path)) == 3


def test_the_cache_is_itself_a_source(tmp_path: Path) -> None:
    with open_one(source(tmp_path)) as batches:
        expected = stream(batches)
    with open_one(DataSpec(source=str(folders(tmp_path)[0]))) as batches:
        assert stream(batches) == expected


def test_a_broken_cache_is_built_again(tmp_path: Path, monkeypatch) -> None:
    built = counted_builds(monkeypatch)
    data = source(tmp_path)
    with open_one(data) as batches:
        expected = stream(batches)
    (folder,) = folders(tmp_path)

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    breaks = [
        lambda: flip(folder / "tokens.bin"),
        lambda: flip(folder / "tokens.documents.bin"),
        lambda: os.truncate(folder / "tokens.bin", 10),
        (folder / "tokens.bin").unlink,
        (folder / "tokens.documents.bin").unlink,
        lambda: (folder / "tokens.json").write_text("{"),
        lambda: (folder / "tokens.json").write_text('{"dtype": "uint16"}'),
        (folder / "tokens.json").unlink,
    ]
    for number, damage in enumerate(breaks, start=2):
        damage()
        with open_one(data) as batches:
            assert stream(batches) == expected
        assert len(built) == number


def test_a_full_disk_leaves_no_half_cache(tmp_path: Path, monkeypatch) -> None:
    data = source(tmp_path, "x" * 100_000)
    add = writer.Writer.add

    with open("/dev/full", "wb", buffering=0) as full, monkeypatch.context() as patch:
        patch.setattr(writer.Writer, "add", lambda self, part: (setattr(self, "_tokens", full), add(self, part)))
        with pytest.raises(ConfigurationError, match="disk is full") as caught:
            open_one(data)
    assert caught.value.code == "PT613"
    assert str(tmp_path / "cache") in str(caught.value)
    assert folders(tmp_path) == []
    open_one(data).close()


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    data = source(tmp_path).model_copy(update={"cache": str(tmp_path / "file" / "cache")})
    with pytest.raises(ConfigurationError, match=r"cannot be written") as caught:
        open_one(data)
    assert caught.value.code == "PT613"


def test_a_sound_cache_needs_no_write_access(tmp_path: Path) -> None:
    data = source(tmp_path)
    with open_one(data) as batches:
        expected = stream(batches)
    lock = folders(tmp_path)[0].with_suffix(".lock")
    lock.unlink()
    lock.mkdir()  # cannot be opened, not even by root
    with open_one(data) as batches:
        assert stream(batches) == expected


def test_what_a_killed_builder_left_is_removed(tmp_path: Path) -> None:
    data = source(tmp_path)
    open_one(data).close()
    (folder,) = folders(tmp_path)
    for name in ("tokens.bin", "tokens.documents.bin", "tokens.json"):
        (folder / name).unlink()
    folder.rename(folder.with_name(folder.name + ".tmp-abc"))
    open_one(data).close()
    assert folders(tmp_path) == [folder]


def test_cache_folder_is_the_configured_one_or_the_users(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    for name in ("PARTOOL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_folder(None) == Path("/home/someone/.cache/partool/tokens")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder(None) == Path("/xdg/partool/tokens")
    monkeypatch.setenv("PARTOOL_CACHE", "/chosen")
    assert cache_folder(None) == Path("/chosen")
    assert cache_folder("/spec") == Path("/spec")


def test_memory_stays_bounded_while_a_large_file_is_tokenised(tmp_path: Path) -> None:
    line = b"a line of text that is neither long nor short\n"
    with (tmp_path / "large.txt").open("wb") as file:
        for _ in range(24):
            file.write(line * ((1 << 20) // len(line)))
    data = DataSpec(source=str(tmp_path / "large.txt"), cache=str(tmp_path / "cache"))
    tracemalloc.start()
    try:
        open_one(data).close()
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 12 << 20
    assert (folders(tmp_path)[0] / "tokens.bin").stat().st_size > 47 << 20


# Several ranks


def run_ranks(data: DataSpec, count: int, builders: set[int]) -> list[object]:
    """Open the data on threads that meet at a barrier; return each one's fingerprint or error."""
    meeting = threading.Barrier(count, timeout=20)
    results: list[object] = [None] * count

    def rank(number: int) -> None:
        try:
            opened = open_data(
                plan(data), dp_rank=number, dp_size=count, barrier=meeting.wait, builder=number in builders
            )
            results[number] = opened.fingerprint
            opened.close()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


@pytest.mark.parametrize("builders", [{0}, {0, 2}])
def test_ranks_wait_for_their_builder(tmp_path: Path, monkeypatch, builders: set[int]) -> None:
    """Two builders represent two nodes with a shared file system."""
    built = counted_builds(monkeypatch)
    results = run_ranks(source(tmp_path), 3, builders)
    assert len(set(results)) == 1, results
    assert isinstance(results[0], str)
    assert len(built) == 1


def test_ranks_wait_for_every_cache_between_token_files(tmp_path: Path, monkeypatch) -> None:
    write_tokens(tmp_path / "b.bin", list(range(40)), vocab=256)
    for name in "ac":
        (tmp_path / f"{name}.txt").write_text(name * 40)
    built = counted_builds(monkeypatch)
    data = DataSpec(source=f"{tmp_path}/*.*", cache=str(tmp_path / "cache"))
    results = run_ranks(data, 3, {0, 2})
    assert len(set(results)) == 1, results
    assert isinstance(results[0], str)
    assert len(built) == 2
    (tmp_path / "d.jsonl").write_text("{")
    results = run_ranks(data, 3, {0})
    assert [getattr(error, "code", error) for error in results] == ["PT602"] * 3


def test_a_builders_error_reaches_every_rank(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "long enough to train on"}\n{')
    data = DataSpec(source=str(tmp_path / "a.jsonl"), cache=str(tmp_path / "cache"))
    results = run_ranks(data, 3, {1})
    assert len({str(error) for error in results}) == 1
    assert [getattr(error, "code", error) for error in results] == ["PT602"] * 3
    assert "a.jsonl:2" in str(results[0])
    nobody = run_ranks(source(tmp_path), 2, set())
    assert ["was not built" in str(error) for error in nobody] == [True, True]
    missing = run_ranks(DataSpec(source=str(tmp_path / "none")), 3, {0})
    assert [getattr(error, "code", error) for error in missing] == ["PT601"] * 3
    (tmp_path / "file").write_text("")
    unwritable = run_ranks(data.model_copy(update={"cache": str(tmp_path / "file" / "x")}), 2, {0})
    assert [getattr(error, "code", error) for error in unwritable] == ["PT613"] * 2


def _build_in_process(data: DataSpec, start: Any, results: Any) -> None:
    start.wait(20)
    opened = open_one(data)
    results.put((opened.fingerprint, stream(opened)[:20]))
    opened.close()


@pytest.mark.timeout(60)
def test_two_processes_build_at_once_and_one_does(tmp_path: Path) -> None:
    data = source(tmp_path, "0123456789" * 2000)
    context = multiprocessing.get_context("spawn")
    start, results = context.Event(), context.Queue()
    processes = [context.Process(target=_build_in_process, args=(data, start, results)) for _ in range(2)]
    for process in processes:
        process.start()
    start.set()
    first, second = results.get(timeout=40), results.get(timeout=40)
    for process in processes:
        process.join(20)
    assert first == second
    assert bytes(first[1]) == b"0123456789" * 2
    (folder,) = folders(tmp_path)
    assert json.loads((folder / "tokens.json").read_text())["count"] == 20_001
