"""Tables of configurations: format, checks, and the entry chosen for each request, by distance."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partool_kernels.registry import ARCHITECTURES, KERNELS, SOURCES, Config, Request, look_up
from partool_kernels.registry import kernels as registered
from partool_kernels.registry import source as sources
from partool_kernels.registry.distance import HEURISTIC, same_device
from partool_kernels.registry.feasible import obstacle
from partool_kernels.registry.look_up import Registry, judge
from partool_kernels.registry.source import source_hash
from partool_kernels.registry.tables import (
    Entry,
    Measured,
    Resources,
    Settings,
    Table,
    TableError,
    add,
    bucket,
    parse,
    path_of,
    read,
    stored,
    text_of,
    write,
)

NAME, HERE = "glu_forward", ("NVIDIA H200", 132)
ASKED = Request(NAME, "sm_90", ("bfloat16",), (("f", 8192),), 4096, ("silu",), *HERE, "3.9")
CONFIG = Config((("BLOCK", 2048),), num_warps=8, num_stages=1)
TIMES = Measured(
    time_s=1e-4, default_s=1.2e-4, reference_s=2e-4, reference="F.silu(gate) * up", error=0.5, repeats=30, tried=9,
    date="2026-11-21", driver="580.1", torch="2.13.0", triton="3.9.0",
)  # fmt: skip


def entry(*, width: int = 8192, rows: int = 4096, measured: bool = True, **changes: Any) -> Entry:
    found: dict[str, Any] = {
        "dtypes": ("bfloat16",), "shape": {"f": width}, "rows": rows, "flags": ("silu",), "triton": "3.9",
        "source_hash": source_hash(NAME), "config": Settings.of(CONFIG),
        "status": "measured" if measured else "modelled", "measured": TIMES if measured else None,
        "device": HERE[0] if measured else "", "units": HERE[1] if measured else 0,
        "resources": {"3.9": Resources(shared_bytes=0, registers=32, spilled_bytes=0)},
    }  # fmt: skip
    return Entry(**(found | changes))


def table(*entries: Entry) -> Table:
    return Table(kernel=NAME, architecture="sm_90").merged(entries)


def registry(folder: Path, *entries: Entry) -> Registry:
    add(NAME, "sm_90", entries, folder)
    return Registry(folder=folder)


ENTRIES = st.builds(
    entry,
    width=st.integers(1, 1 << 20),
    rows=st.integers(0, 24).map(lambda power: 1 << power),
    measured=st.booleans(),
    triton=st.builds("{}.{}".format, st.integers(3, 4), st.integers(0, 12)),
    source_hash=st.sampled_from([source_hash(NAME), "0" * 16]),
    config=st.sampled_from(list(KERNELS[NAME].configs(ASKED))).map(Settings.of),
)
REQUESTS = st.builds(
    lambda width, rows, device, units: replace(ASKED, shape=(("f", width),), rows=rows, device=device, units=units),
    width=st.integers(1, 1 << 20),
    rows=st.integers(1, 1 << 24),
    device=st.sampled_from(["NVIDIA H200", "h200", "NVIDIA H100", ""]),
    units=st.sampled_from([0, 132, 114]),
)


@given(st.lists(ENTRIES, max_size=6))
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read(entries: list[Entry]) -> None:
    made = table(*entries)
    assert parse(text_of(made), "x") == made
    assert [each.key for each in made.entries] == sorted({each.key for each in entries})
    assert made.merged(made.entries) == made


@given(st.lists(ENTRIES, max_size=6), REQUESTS)
@settings(max_examples=150, deadline=None)
def test_look_up_prefers_the_surer_source_then_the_nearer_entry(entries: list[Entry], request: Request) -> None:
    made = Registry(folder=Path("/nowhere"))
    made._tables[NAME, "sm_90"] = [("x", table(*entries))]
    # Only the last of several entries with the same key is kept.
    judged = [found for one in table(*entries).entries if (found := judge(request, one))]
    judged = [found for found in judged if obstacle(request, found.config) is None]
    best = max([SOURCES.index(found.source) for found in judged], default=0)
    nearest = min([found.distance for found in judged if SOURCES.index(found.source) == best], default=HEURISTIC)
    choice = made.get(request)
    assert SOURCES.index(choice.source) == best
    assert choice.distance == nearest
    assert all(later.distance >= 0.0 for later in made.choices(request))


@given(st.lists(ENTRIES, max_size=6), st.integers(1, 1 << 20), st.integers(0, 20))
@settings(max_examples=60, deadline=None)
def test_all_rows_of_a_bucket_have_one_answer(entries: list[Entry], width: int, power: int) -> None:
    made = Registry(folder=Path("/nowhere"))
    made._tables[NAME, "sm_90"] = [("x", table(*entries))]
    last = 1 << power
    answers = {
        made.get(replace(ASKED, shape=(("f", width),), rows=rows))
        for rows in {last // 2 + 1, (3 * last + 3) // 4, last}
    }
    assert len(answers) == 1


def test_buckets() -> None:
    assert [bucket(rows) for rows in (0, 1, 2, 3, 4, 5, 4096, 4097)] == [1, 1, 2, 4, 4, 8, 4096, 8192]


@pytest.mark.parametrize(
    ("changes", "source", "distance"),
    [
        ({}, "exact", 0.0),
        ({"rows": 1024}, "rows", 2.0),
        ({"width": 16384}, "shape", 2.0),
        ({"width": 16384, "rows": 8192}, "shape", 3.0),
        ({"device": "NVIDIA H100", "units": 132}, "device", 4.0),
        ({"units": 66}, "device", 5.0),
        ({"device": "NVIDIA H100", "units": 66, "width": 4096}, "device", 7.0),
        ({"triton": "3.7"}, "exact", 2.0),
        ({"triton": "4.0"}, "exact", 8.0),
        ({"source_hash": "0" * 16}, "modelled", 2.0),
        ({"measured": False}, "modelled", 8.0),
    ],
)
def test_sources_and_distances(tmp_path: Path, changes: dict[str, Any], source: str, distance: float) -> None:
    choice = registry(tmp_path, entry(**changes)).get(ASKED)
    assert (choice.source, choice.distance, choice.config) == (source, distance, CONFIG)
    assert (choice.time_s == TIMES.time_s) == (source == "exact")
    assert choice.table == str(path_of(NAME, "sm_90", tmp_path))


@pytest.mark.parametrize(
    "changes",
    [
        {"width": 16400},
        {"flags": ("gelu",)},
        {"dtypes": ("float16",)},
        {"measured": False, "rows": 8192},
        {"measured": False, "width": 8208},
    ],
)
def test_what_is_too_far_leaves_the_rule(tmp_path: Path, changes: dict[str, Any]) -> None:
    choice = registry(tmp_path, entry(**changes)).get(ASKED)
    assert (choice.source, choice.distance) == ("heuristic", HEURISTIC)
    assert choice.config == KERNELS[NAME].default(ASKED)


def test_surer_sources_win_whatever_the_distance(tmp_path: Path) -> None:
    far_rows, near_shape = entry(rows=1), entry(width=8200)
    other = entry(device="NVIDIA H100", config=Settings.of(Config((("BLOCK", 512),), 4, 1)))
    made = registry(tmp_path, far_rows, near_shape, other, entry(rows=2048, measured=False))
    assert [choice.source for choice in made.choices(ASKED)] == ["rows", "shape", "device", "heuristic"]


def test_what_cannot_run_is_passed_over(tmp_path: Path) -> None:
    small = Resources(shared_bytes=1000, registers=32, spilled_bytes=0)
    large = Resources(shared_bytes=10**6, registers=32, spilled_bytes=0)
    far = entry(rows=2048)
    made = registry(tmp_path, entry(resources={"3.9": small, "3.7": large}), far)
    assert made.get(ASKED).source == "exact"
    # With that compiler version the entry needs more resources than the device has.
    assert made.get(replace(ASKED, triton="3.7")).source == "rows"
    # For an unrecorded version the largest recorded need counts.
    assert made.get(replace(ASKED, triton="3.8")).source == "rows"


def test_a_kernel_may_refuse_a_neighbours_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = registry(tmp_path, entry())
    covering = dataclasses.replace(KERNELS[NAME], legal=lambda request, config: request.width["f"] <= 8192)
    monkeypatch.setitem(registered.KERNELS, NAME, covering)
    assert made.get(ASKED).source == "exact"
    assert made.get(replace(ASKED, shape=(("f", 8193),))).source == "heuristic"


def _narrow(*flags: str) -> Request:
    return Request("fp8_quantise", "sm_90", ("bfloat16", "float8_e4m3fn"), (("k", 256),), 256, flags)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Config((("BLOCK", 1000),)), "powers of two"),
        (Config((("BLOCK", 0),)), "below 1"),
        (Config((("SIZE", 1024),)), "constants are BLOCK"),
        (Config((("BLOCK", 1024),), num_warps=3), "no power of two"),
        (Config((("BLOCK", 1024),), num_warps=64), "more than 1024 threads"),
        (Config((("BLOCK", 1024),), matrix_instr_nonkdim=5), "5 rows"),
    ],
)
def test_obstacles(config: Config, words: str) -> None:
    assert words in str(obstacle(ASKED, config))
    assert words in _refused(text_of(Table(kernel=NAME, architecture="sm_90", entries=(_with(config),))))


@pytest.mark.parametrize(
    ("request_", "changes", "words"),
    [
        (Request("gemm", "sm_90", ("bfloat16",) * 2, (("n", 256), ("k", 256)), 256, ("nt",)), {"SPLIT": 0}, "below 1"),
        (Request("gemm", "sm_90", ("bfloat16",) * 2, (("n", 256), ("k", 256)), 256, ("nt",)), {"GROUP_M": 0}, "below"),
        (Request("norm_forward", "sm_90", ("bfloat16",), (("n", 256),), 256, ("rms",)), {"ROWS": 3}, "powers of two"),
        (_narrow("plain"), {"ROWS": 32}, "None"),
        (_narrow("plain"), {"ROWS": 48}, "powers of two"),
        (_narrow("turned"), {"ROWS": 32}, "do not fit"),
        (_narrow("plain", "square"), {"ROWS": 32}, "do not fit"),
        (_narrow("plain", "turned"), {"ROWS": 8, "COLUMNS": 64}, "None"),
        (_narrow("plain", "turned"), {"ROWS": 256}, "do not fit"),
        (_narrow("plain"), {"COLUMNS": 64}, "do not fit"),
        (_narrow("turned"), {"COLUMNS": 256}, "do not fit"),
        (_narrow("square", "turned"), {"COLUMNS": 64}, "do not fit"),
    ],
)
def test_constants_that_compute_something_else_are_obstacles(
    request_: Request, changes: dict[str, int], words: str
) -> None:
    rule = KERNELS[request_.kernel].default(request_)
    assert obstacle(request_, rule) is None
    changed = replace(rule, blocks=tuple((rule.constants | changes).items()))
    assert words in str(obstacle(request_, changed))


def _with(config: Config) -> Entry:
    return entry(config=Settings.of(config))


def _refused(text: str) -> str:
    with pytest.raises(TableError) as found:
        parse(text, "t.json")
    return str(found.value)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_rule_and_stored_entry_can_run(kernel: str, architecture: str) -> None:
    for request in KERNELS[kernel].examples(architecture):
        assert obstacle(request, KERNELS[kernel].default(request)) is None
        assert look_up.get(request).source in SOURCES
    for request, config, _ in stored(kernel, architecture):
        assert obstacle(request, config) is None


def _faults() -> Iterator[tuple[dict[str, Any], str]]:
    whole = json.loads(text_of(table(entry())))

    def with_entry(**changes: Any) -> dict[str, Any]:
        return whole | {"entries": [whole["entries"][0] | changes]}

    yield whole | {"format": 2}, "format"
    yield whole | {"kernel": "nope"}, "no kernel 'nope'"
    yield whole | {"architecture": "sm_75"}, "no architecture 'sm_75'"
    yield whole | {"more": 1}, "more"
    yield with_entry(rows=3), "no power of two"
    yield with_entry(rows="4096"), "rows"
    yield with_entry(shape={"n": 8192}), "shape has n"
    yield with_entry(shape={"f": 0}), "shape.f"
    yield with_entry(status="modelled"), "modelled ones none"
    yield with_entry(device=""), "name the device"
    yield with_entry(triton="3.9.0"), "triton"
    yield with_entry(measured=whole["entries"][0]["measured"] | {"time_s": 0.0}), "measured.time_s"
    yield with_entry(measured=whole["entries"][0]["measured"] | {"error": 1.5}), "measured.error"
    yield with_entry(measured=whole["entries"][0]["measured"] | {"date": "yesterday"}), "measured.date"
    yield with_entry(resources={"3.9": {"shared_bytes": 10**7, "registers": 1, "spilled_bytes": 0}}), "10000000 bytes"
    yield whole | {"entries": whole["entries"] * 2}, "entries.1: the same"


@pytest.mark.parametrize(("body", "words"), list(_faults()), ids=lambda value: value if isinstance(value, str) else "")
def test_faults_of_a_table_are_named(body: dict[str, Any], words: str) -> None:
    told = _refused(json.dumps(body))
    assert told.startswith("t.json: ")
    assert words in told


def test_a_measured_entry_never_gives_way_to_a_modelled_one() -> None:
    measured = entry()
    modelled = entry(measured=False, device=HERE[0], units=HERE[1])
    assert table(measured, modelled).entries == (measured,)
    assert table(modelled, measured).entries == (measured,)
    newer = measured.model_copy(update={"measured": TIMES.model_copy(update={"time_s": 5e-5})})
    assert table(measured).merged([newer]).entries == (newer,)


def test_files(tmp_path: Path) -> None:
    path = add(NAME, "sm_90", [entry()], tmp_path)
    assert [(request, config) for request, config, _ in stored(NAME, "sm_90", tmp_path)] == [(ASKED, CONFIG)]
    assert [each.name for each in path.parent.iterdir()] == ["sm_90.json"]  # no temporary file is left
    path.write_text("{")
    with pytest.raises(TableError, match=r"sm_90\.json: .*JSON"):
        read(path)
    path.write_bytes(b"\xff")
    with pytest.raises(TableError, match="utf-8"):
        read(path)
    with pytest.raises(TableError, match="No such file"):
        read(tmp_path / "none.json")
    with pytest.raises(TableError):
        write(table(entry()).model_copy(update={"kernel": "nope"}), path)
    assert path.read_bytes() == b"\xff"


def test_a_users_table_wins_among_equals(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    own = Settings.of(Config((("BLOCK", 512),), 4, 1))
    path = add(NAME, "sm_90", [entry(config=own)], mine)
    add(NAME, "sm_90", [entry()], theirs)
    for place in (mine, path):
        assert Registry([place], folder=theirs).get(ASKED).config == own.config
    # An installed entry from a more reliable source still wins.
    add(NAME, "sm_90", [entry(config=own, rows=8192)], tmp_path / "other")
    assert Registry([tmp_path / "other"], folder=theirs).get(ASKED).config == CONFIG
    with pytest.raises(TableError, match="does not exist"):
        Registry([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(TableError, match="it is empty"):
        Registry([tmp_path / "empty"])


def test_the_process_looks_where_it_is_told(tmp_path: Path) -> None:
    import torch

    from partool_kernels.device import KernelCall, choose, use_tables

    call = KernelCall(NAME, (torch.bfloat16,), (("f", 8192),), 4096, ("silu",))
    own = Settings.of(Config((("BLOCK", 512),), 4, 1))
    add(NAME, "sm_90", [entry(config=own)], tmp_path)
    try:
        before = choose(call, torch.device("cpu"))
        use_tables([str(tmp_path)])
        assert choose(call, torch.device("cpu")).config == own.config != before.config
    finally:
        use_tables([])
    assert choose(call, torch.device("cpu")) == before


def test_names_of_devices() -> None:
    assert same_device("NVIDIA H200", "h200")
    assert same_device("AMD Instinct MI300X", "AMD_Instinct_MI300X")
    assert not same_device("NVIDIA H200", "NVIDIA H20")
    assert not same_device("", "NVIDIA H200")


KERNEL = '''
"""About."""
import triton
import triton.language as tl

SIZE = tl.constexpr(4)

@triton.jit
def helper(x):
    return x + SIZE

@triton.jit
def other(x):
    return x

@triton.jit
def kernel(x):
    """Compute it."""
    y = helper(x)  # well
    return y
'''


@pytest.fixture
def hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    folder = tmp_path / "partool_kernels" / "made"
    folder.mkdir(parents=True)
    made = dataclasses.replace(KERNELS[NAME], name="made", source="made/kernel.py", function="kernel")
    monkeypatch.setitem(registered.KERNELS, "made", made)
    monkeypatch.setattr(sources, "_ROOT", tmp_path)

    def compute(text: str) -> str:
        (folder / "kernel.py").write_text(text)
        sources._names.cache_clear()
        source_hash.cache_clear()
        return source_hash("made")

    yield compute
    sources._names.cache_clear()
    source_hash.cache_clear()


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("# well", "# better", True),
        ("Compute it.", "Compute.", True),
        ("y = helper(x)", "y  =  helper( x )", True),
        ("def other(x):\n    return x", "def other(x):\n    return x - 1", True),
        ("x + SIZE", "x - SIZE", False),
        ("constexpr(4)", "constexpr(8)", False),
        ("return y", "return -y", False),
        ("@triton.jit\ndef kernel", "@triton.jit(noinline=True)\ndef kernel", False),
    ],
)
def test_the_hash_follows_what_is_computed(hashed: Any, old: str, new: str, same: bool) -> None:
    assert old in KERNEL
    assert (hashed(KERNEL) == hashed(KERNEL.replace(old, new))) == same


def test_the_hash_follows_imports_from_other_files(hashed: Any, tmp_path: Path) -> None:
    common = tmp_path / "partool_kernels" / "common.py"
    text = KERNEL.replace("SIZE = tl.constexpr(4)", "from partool_kernels.common import SIZE")
    common.write_text("SIZE = 4\n")
    before = hashed(text)
    common.write_text("SIZE = 4  # more\nOTHER = 1\n")
    assert hashed(text) == before
    common.write_text("SIZE = 5\n")
    assert hashed(text) != before
