"""Coverage of plans by kernels: each product asks its own shape, sources come from tables, strict levels refuse."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import plan_of, result_of

from partool.cli.main import run
from partool.cost.time.gemm import equations_s, tiled_s
from partool.cost.training.predict import matmul_flops_per_token
from partool.plan.types import Plan
from partool.planner import PlanResult, make_plan
from partool.planner.findings.kernels import check_kernels
from partool.planner.kernels.choose import Coverage, KernelLine, coverage, requests
from partool.planner.kernels.requests import PARTS, counted
from partool.planner.rules.kernels import absolute
from partool.spec import load
from partool.work.training import TrainingWork
from partool_kernels.registry import KERNELS, SOURCES, Request, Source, tables
from partool_kernels.registry.look_up import Registry
from partool_kernels.registry.source import source_hash

ROOT = Path(__file__).parents[3]
EIGHT = """\
model: {layers: 4, hidden: 1024, heads: 8, kv_heads: 2, vocab: 32000, ffn_hidden: 4096}
hardware: {accelerator: h200, per_node: 4}
data: python-stdlib
training: {sequence_length: 1024, global_batch: 32, precision: fp8}
"""
DEVICE = ("NVIDIA H200", 132)


def planner_says(*overrides: str, text: str = EIGHT) -> PlanResult:
    return result_of(text, *overrides)


@functools.cache
def planned(*overrides: str, text: str = EIGHT) -> Plan:
    return plan_of(text, *overrides)


@functools.cache
def deepseek() -> Plan:
    return plan_of((ROOT / "specs/deepseek-v3-mi355x.yaml").read_text(encoding="utf-8"), folder=ROOT / "specs")


def entry(request: Request, device: tuple[str, int] = DEVICE, gain: float = 2.0) -> tables.Entry:
    """Return a measured entry for a request: 1 ms with the rule's own configuration, ``gain`` of that before."""
    measured = tables.Measured(
        time_s=1e-3, default_s=gain * 1e-3, reference_s=3e-3, reference="torch", error=0.5, repeats=20, tried=9,
        date="2026-11-21", driver="570", torch="2.13.0", triton="3.9.0",
    )  # fmt: skip
    return tables.Entry(
        dtypes=request.dtypes,
        shape=request.width,
        rows=tables.bucket(request.rows),
        flags=request.flags,
        device=device[0],
        units=device[1],
        triton="3.9",
        source_hash=source_hash(request.kernel),
        status="measured",
        config=tables.Settings.of(KERNELS[request.kernel].default(request)),
        measured=measured,
    )


def written(folder: Path, *entries: tables.Entry, architecture: str = "sm_90") -> Path:
    table = tables.Table(kernel="gemm_a8w8", architecture=architecture).merged(entries)
    tables.write(table, tables.path_of("gemm_a8w8", architecture, folder))
    return folder


def line_of(found: Coverage, name: str, part: str = "forward") -> KernelLine:
    (line,) = (line for line in found.lines if (line.asked.name, line.asked.part) == (name, part))
    return line


def request_of(plan: Plan, name: str, part: str = "forward") -> Request:
    request = line_of(coverage(plan, Registry()), name, part).asked.request
    assert request is not None
    return request


def test_products_of_deepseek_v3_are_asked_as_they_run() -> None:
    """In all three passes; experts by rank, the head and router wide."""
    plan = deepseek()
    found = coverage(plan)
    asked = {
        (line.asked.name, line.asked.part): line.asked.request for line in found.lines if line.asked.request is not None
    }
    shapes = {name: tuple(request.width.values()) for (name, part), request in asked.items() if part == "forward"}
    assert shapes.items() >= {
        "attention.q_a": (1536, 7168), "attention.q_b": (24576, 1536), "attention.kv_a": (576, 7168),
        "attention.kv_b": (32768, 512), "attention.o": (7168, 16384), "ffn.gate, up": (18432, 7168),
        "ffn.down": (7168, 18432), "moe.shared.gate, up": (2048, 7168), "moe.shared.down": (7168, 2048),
    }.items()  # fmt: skip
    rows = plan.tokens
    forward, inputs, weights = (asked["attention.o", part] for part in ("forward", "input gradient", "weight gradient"))
    assert forward is not None
    assert inputs is not None
    assert weights is not None
    assert (forward.rows, forward.dtypes, forward.flags) == (rows, ("float8_e4m3fn", "bfloat16"), ())
    assert (inputs.rows, inputs.shape, inputs.flags) == (rows, (("n", 16384), ("k", 7168)), ())
    assert (weights.rows, weights.shape, weights.flags) == (7168, (("n", 16384), ("k", rows)), ("rows",))
    assert (forward.architecture, forward.device, forward.units) == ("gfx950", "mi355x", 256)
    experts = line_of(found, "moe.experts.gate, up").asked
    assert (experts.groups, experts.sides[1:]) == (32, (4096, 7168))
    assert experts.rows.least == 0
    assert experts.sides[0] == pytest.approx(rows * 8 / 256 * 8)
    for name in ("head", "moe.router"):
        assert all(line.asked.wide for line in found.lines if line.asked.name == name)
        assert line_of(found, name).asked.kernel != "gemm_a8w8"


_AITER = {
    "BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 4, "num_warps": 4, "num_stages": 2,
    "waves_per_eu": 2, "matrix_instr_nonkdim": 16, "cache_modifier": None, "NUM_KSPLIT": 1,
}  # fmt: skip
_TUNED_BY_AITER = (
    (2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (36864, 7168), (7168, 18432), (4096, 7168), (7168, 2048),
    (3072, 1536), (4608, 7168), (512, 7168), (7168, 256),
)  # fmt: skip
"""Widths for which ROCm/aiter has files of 8-bit products on MI355X: all of DeepSeek-V3 over data and experts, and
six of eight over eight tensor ranks."""


def aiter(folder: Path) -> Path:
    """Write a folder as aiter's: a default, and files for some widths."""
    (folder / "gemm").mkdir(parents=True)
    name = "gfx950-GEMM-A8W8_BLOCKSCALE"
    for widths in ("", *(f"-N={n}-K={k}" for n, k in _TUNED_BY_AITER)):
        body = {"M_LEQ_8192": _AITER, "any": _AITER}
        (folder / "gemm" / f"{name}{widths}.json").write_text(json.dumps(body))
    return folder


def vllm(folder: Path, experts: int, width: int) -> Path:
    """Write a file as vLLM's, for experts of a rank."""
    folder.mkdir()
    name = f"E={experts},N={width},device_name=AMD_Instinct_MI355X,dtype=fp8_w8a8,block_shape=[128,128].json"
    config = {key: value for key, value in _AITER.items() if isinstance(value, int) and key != "NUM_KSPLIT"}
    (folder / name).write_text(json.dumps({"64": config, "4096": config}))
    return folder


@pytest.mark.parametrize(
    ("overrides", "covered"),
    [(("parallel.micro_batch=1",), 5), (("parallel.micro_batch=1", "parallel.tensor=8", "parallel.expert=1"), 3)],
)
def test_tables_of_engines_cover_deepseek_v3(tmp_path: Path, overrides: tuple[str, ...], covered: int) -> None:
    """Of the plan's own shapes, what another engine's kernels are tuned for; partool's own kernel has none of it.

    Engines multiply both latents at once, and gate and up; partool has no such products.
    """
    loaded = load(ROOT / "specs/deepseek-v3-mi355x.yaml", overrides=[*overrides, "training.sequence_length=1024"])
    assert loaded.spec is not None, loaded.diagnostics
    plan = make_plan(loaded.spec, base_dir=ROOT, default_name="test").plan
    assert plan is not None
    layout = plan.layout
    experts = vllm(tmp_path / "experts", 256 // layout.expert, 2048 // layout.mesh.tp)
    found = coverage(plan, Registry([aiter(tmp_path / "configs"), experts], tmp_path / "none"))
    forward = [line for line in found.lines if line.asked.part == "forward" and line.asked.kernel == "gemm_a8w8"]
    tuned = {line.asked.name for line in forward if line.state == "tuned"}
    assert len(forward) == 9
    assert len(tuned) == covered
    assert {line.choice.implementation for line in forward if line.choice and line.state == "tuned"} == {"aiter"}
    missing = {line.asked.name for line in forward if line.state != "tuned"}
    single = {"attention.q_a", "attention.kv_a", "ffn.gate, up", "moe.shared.gate, up"}
    assert missing == single | (set() if covered == 5 else {"attention.kv_b", "ffn.down"})
    weights = line_of(found, "attention.o", "weight gradient")
    assert weights.state == "untuned"
    grouped = [line for line in found.lines if line.asked.name.startswith("moe.experts")]
    by_vllm = {(line.asked.name, line.asked.part) for line in grouped if line.tabled}
    assert by_vllm == {("moe.experts.gate, up", "forward"), ("moe.experts.down", "forward")}


def test_experts_in_16_bits_are_asked_of_grouped_products() -> None:
    """All experts of a rank at once: gate and up as one, rows together; torch computes them, tables are beside."""
    loaded = load(ROOT / "specs/mixtral-8x7b.yaml", overrides=["parallel.expert=4", "parallel.tensor=1"])
    assert loaded.spec is not None, loaded.diagnostics
    plan = make_plan(loaded.spec, base_dir=ROOT, default_name="test").plan
    assert plan is not None
    found = coverage(plan, Registry())
    up = [line_of(found, "moe.experts.gate, up", part) for part in PARTS]
    requests = [line.asked.request for line in up]
    tokens = plan.tokens * 2  # Two experts each, and the ranks that share experts send as many as they receive.
    forward, inputs, weights = requests
    assert forward is not None
    assert inputs is not None
    assert weights is not None
    assert (forward.kernel, forward.shape) == ("grouped_gemm", (("n", 28672), ("k", 4096), ("e", 2)))
    assert (inputs.shape, inputs.flags) == ((("n", 4096), ("k", 28672), ("e", 2)), ("nn",))
    assert (weights.kernel, weights.shape) == ("grouped_gemm_weight", (("m", 28672), ("n", 4096), ("e", 2)))
    assert {request.rows for request in (forward, inputs, weights)} == {tokens}
    assert {line.state for line in up} == {"library"}
    assert all(line.choice is not None for line in up)


def test_every_source_is_told_and_costs_what_its_configuration_loses(tmp_path: Path) -> None:
    plan = planned()
    request = request_of(plan, "ffn.down")
    alone = line_of(coverage(plan, Registry()), "ffn.down")
    assert alone.state == "untuned"

    def one(entry_: tables.Entry, place: str) -> KernelLine:
        registry = Registry([written(tmp_path / place, entry_)], folder=tmp_path / "none")
        return line_of(coverage(plan, registry), "ffn.down")

    exact = one(entry(request), "exact")
    assert (exact.state, exact.measured, exact.call_s, exact.lost_s) == ("tuned", True, 1e-3, 0.0)
    assert exact.total_s == pytest.approx(1e-3 * 4 * plan.layout.derived.accumulation)
    assert exact.share == pytest.approx(exact.total_s / plan.prediction.time.step_time_s)
    whole = coverage(plan, Registry([tmp_path / "exact"], folder=tmp_path / "none"))
    # The gradient of the input of gate and up is the same product.
    same = [exact, line_of(whole, "ffn.gate, up", "input gradient")]
    assert {line.asked.request for line in same} == {request}
    difference = sum(line.asked.calls * (1e-3 - alone.call_s) for line in same)
    assert whole.measured_step_s == pytest.approx(whole.step_s + difference)
    other = request.rows * 4
    rows = one(entry(Request(**{**_fields(request), "rows": other})), "rows")
    assert (rows.state, rows.choice and rows.choice.source, rows.measured) == ("nearest", "rows", False)
    assert rows.call_s == alone.call_s
    wide = tuple((name, width * 3 // 2) for name, width in request.shape)
    shape = one(entry(Request(**{**_fields(request), "shape": wide})), "shape")
    assert shape.choice is not None
    assert shape.choice.source == "shape"
    device = one(entry(request, ("NVIDIA H100 80GB HBM3", 132)), "device")
    assert device.choice is not None
    assert (device.choice.source, device.measured) == ("device", False)


def _fields(request: Request) -> dict[str, object]:
    return {name: getattr(request, name) for name in Request.__dataclass_fields__}


def test_what_tuning_gained_elsewhere_is_what_it_may_gain_here(tmp_path: Path) -> None:
    """Three measured entries of a table and its rule is told to lose their median; with fewer the tile model tells."""
    plan = planned()
    far = Request(**{**_fields(request_of(plan, "ffn.down")), "shape": (("n", 64 * 1024), ("k", 128 * 1024))})  # type: ignore[arg-type]
    entries = [
        entry(Request(**{**_fields(far), "rows": 1024 * 2**place}), gain=gain)  # type: ignore[arg-type]
        for place, gain in enumerate((1.25, 1.5, 4.0))
    ]
    lines = [
        line_of(
            coverage(plan, Registry([written(tmp_path / str(count), *entries[:count])], tmp_path / "none")), "ffn.down"
        )
        for count in (2, 3)
    ]
    assert [line.state for line in lines] == ["untuned", "untuned"]
    assert lines[1].lost_s == pytest.approx(0.5 * lines[1].call_s)
    assert lines[0].lost_s != pytest.approx(lines[1].lost_s)


def test_a_device_goes_by_all_names_of_its_forms(tmp_path: Path) -> None:
    """Drivers tell an A100's socket; the catalog has one entry for all forms."""
    plan = planned("hardware.accelerator=a100-80", "training.precision=bf16", "parallel.compile=none")
    found = [line.asked.request for line in coverage(plan, Registry()).lines if line.asked.kernel == "glu_forward"]
    assert found[0] is not None
    measured = entry(found[0], ("NVIDIA A100 80GB PCIe", 108))
    tables.add("glu_forward", "sm_80", [measured], tmp_path)
    gates = [line for line in coverage(plan, Registry([tmp_path])).lines if line.asked.kernel == "glu_forward"]
    assert [line.state for line in gates] == ["tuned"]


def test_shares_add_up_and_untuned_kernels_are_named() -> None:
    found = coverage(planned(), Registry())
    assert sum(found.share.values()) == pytest.approx(sum(line.share for line in found.lines))
    assert 0.0 < sum(found.share.values()) < 1.0
    assert "gemm_a8w8" in found.untuned
    assert found.lost_s == pytest.approx(sum(line.asked.calls * line.lost_s for line in found.lines))


def test_what_is_worth_measuring_is_asked_once_each() -> None:
    plan = planned()
    found = requests(plan)
    assert len(found) == len(set(found))
    assert {request.kernel for request in found} >= {"gemm_a8w8", "fp8_quantise"}
    assert "gemm" not in {request.kernel for request in found}
    named = requests(plan, ["gemm"])
    assert {request.kernel for request in named} == {"gemm"}
    head = named[0]
    assert (head.shape, head.flags, head.dtypes) == ((("n", 32000), ("k", 1024)), ("nt",), ("bfloat16", "bfloat16"))
    for request in [*found, *named]:
        kernel = KERNELS[request.kernel]
        assert tuple(request.width) == kernel.widths
        assert {request.flags} <= {example.flags for example in kernel.examples("sm_90")}
        assert kernel.default(request) is not None
        assert kernel.moved_bytes(request) > 0


def test_without_kernels_libraries_compute_all() -> None:
    for override in ("kernels.mode=torch", "hardware.accelerator=l40s"):
        found = coverage(planned(override))
        assert {line.state for line in found.lines} == {"library"}
        assert (found.worst, found.untuned, found.lost_s) == (None, [], 0.0)


def test_a_strict_level_refuses_the_plan_until_tables_reach_it(tmp_path: Path) -> None:
    for level in SOURCES[1:]:
        strict = planned().kernels.model_copy(update={"require": level})
        (finding,) = check_kernels(planned().model_copy(update={"kernels": strict}))
        assert (finding.code, finding.severity) == ("PT491", "error")
        assert f"require: {level}" in finding.message
        assert finding.message.startswith("15 of 15 matrix products")
    assert planner_says("kernels.require=exact").plan is None
    asked = [line.asked for line in coverage(planned(), Registry()).lines if line.asked.product]
    entries = [entry(one.request) for one in asked if one.request is not None and one.kernel == "gemm_a8w8"]
    folder = written(tmp_path, *entries)
    result = planner_says("kernels.require=exact", f"kernels.tuned=[{folder}]")
    assert result.plan is not None, result.diagnostics
    assert coverage(result.plan).worst == "exact"
    written(folder, entries[0])
    less = planner_says(f"kernels.tuned=[{folder}]").plan
    assert less is not None
    name = f"kernels.tuned/{folder}"
    assert less.inputs[name] != result.plan.inputs[name]


def test_tables_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"format": 1, "kernel": "gemm_a8w8"}')
    for path, what in (("nowhere", "there is no"), ("bad.json", "bad.json")):
        result = planner_says(f"kernels.tuned=[{tmp_path / path}]")
        assert result.plan is None
        (finding,) = (one for one in result.diagnostics if one.code == "PT492")
        assert what in finding.message


def test_what_is_required_can_be_looked_at_and_tuned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PT491 ends plan and --check, not what lists and measures such products; nor does a folder that is to come."""
    spec = tmp_path / "a.yaml"
    spec.write_text(EIGHT + "kernels: {require: exact, tuned: [here, tuned]}\n")
    (tmp_path / "here").mkdir()
    found = coverage(planned(), Registry()).lines
    requests = [line.asked.request for line in found if line.asked.request and line.asked.kernel == "gemm_a8w8"]
    written(tmp_path / "here", entry(requests[0]))

    def call(*words: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as end:
            run([*words])
        shown = capsys.readouterr()
        return end.value.code, shown.out, shown.err

    code, _, err = call("plan", str(spec), "--show", "kernels")
    assert (code, "error[PT492]" in err) == (1, True)
    monkeypatch.setattr("partool.launch.tune._process", lambda requests, tuning: iter([]))
    code, _, err = call("tune", str(spec), "--dry-run")
    assert (code or 0, "warning[PT491]" in err, "warning[PT492]" in err) == (0, True, True), err
    (tmp_path / "tuned").mkdir()
    code, _, err = call("tune", str(spec), "--dry-run")
    assert (code, "error[PT492]" in err, "it is empty" in err) == (1, True, True)
    spec.write_text(EIGHT + "kernels: {require: exact, tuned: [here]}\n")
    code, out, err = call("plan", str(spec), "--show", "kernels")
    assert (code or 0, "warning[PT491]" in err) == (0, True)
    assert "kernels: {tuned: [here, tuned]}" in " ".join(out.split())
    for more in ((), ("--check",), ("--show", "kernels", "--out", str(tmp_path / "plan.json"))):
        code, _, err = call("plan", str(spec), *more)
        assert (code, "error[PT491]" in err) == (1, True)


def test_paths_of_tables_start_at_home_or_the_specs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/homes/me")
    assert absolute("~/t", tmp_path) == Path("/homes/me/t")
    assert absolute("../t", tmp_path / "sub") == tmp_path / "t"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "it is empty"),
        (["broken.json"], "broken.json is named like none of them"),
        (["gemm_a8w8/sm_90.json"], "name the folder above"),
        (["gfx950-GEMM-A8W8_BLOCKSCALE-N=2112-K=7168.json"], "configs/gemm/gfx950-GEMM-A8W8_BLOCKSCALE.json"),
    ],
)
def test_folders_that_hold_nothing_say_what_is_missing(tmp_path: Path, files: list[str], words: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{")
    folder = tmp_path / "gemm_a8w8" if (tmp_path / "gemm_a8w8").exists() else tmp_path
    result = planner_says(f"kernels.tuned=[{folder}]")
    (finding,) = (one for one in result.diagnostics if one.code == "PT492")
    assert words in finding.message
    assert finding.message.count("holds no") == 0


def test_times_that_cannot_be_true_are_not_used(tmp_path: Path) -> None:
    plan = planned()
    request = request_of(plan, "ffn.down")
    right = entry(request)
    assert right.measured is not None
    for factor, believed in ((1.0, True), (1e-7, False), (1e5, False)):
        time_s = coverage(plan, Registry()).lines[0].modelled_s * factor
        measured = right.measured.model_copy(
            update={"time_s": time_s, "default_s": 2 * time_s, "reference_s": 3 * time_s}
        )
        folder = written(tmp_path / str(factor), right.model_copy(update={"measured": measured}))
        result = planner_says(f"kernels.tuned=[{folder}]")
        assert result.plan is not None
        found = [one for one in result.diagnostics if one.code == "PT493"]
        assert [one.severity for one in found] == [] if believed else ["warning"]
        lines = coverage(result.plan).lines
        assert any(line.measured for line in lines) == believed
        assert sum(line.share for line in lines) < 1.0


LEVELS: list[Source] = list(SOURCES)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(4, 16), min_size=1, max_size=3, unique=True), st.data())
def test_rows_to_entry_is_piecewise_constant_and_levels_are_monotone(
    tmp_path_factory: pytest.TempPathFactory, powers: list[int], data: st.DataObject
) -> None:
    """Every number of rows of one bucket gets one answer; a stricter level never finds fewer products below it."""
    plan = planned()
    request = request_of(plan, "ffn.down")
    entries = [entry(Request(**{**_fields(request), "rows": 2**power})) for power in powers]  # type: ignore[arg-type]
    folder = tmp_path_factory.mktemp("tuned")
    registry = Registry([written(folder, *entries)], folder / "none")
    power = data.draw(st.integers(3, 17))
    rows = data.draw(st.lists(st.integers(2 ** (power - 1) + 1, 2**power), min_size=2, max_size=5))
    answers = {registry.coverage(Request(**{**_fields(request), "rows": one})) for one in rows}  # type: ignore[arg-type]
    if power in powers:
        assert {answer.source for answer in answers} == {"exact"}
    assert len({(answer.source, answer.config, answer.distance) for answer in answers}) == 1
    found = coverage(plan, registry)
    counts = [len(found.below(level)) for level in LEVELS]
    assert counts[0] == 0
    assert counts == sorted(counts)


_SIDE = st.integers(16, 40_000)


@settings(max_examples=100, deadline=None)
@given(_SIDE, _SIDE, _SIDE, st.sampled_from([1, 8]))
def test_the_tile_model_is_the_cost_models_with_its_own_tiles(m: int, n: int, k: int, batch: int) -> None:
    """The best tile of the equations takes what they say."""
    job = TrainingWork(planned().model, planned().devices, 1024, "fp8", global_batch=32)
    tiles = [(256, 128), (128, 128), (128, 64), (64, 64)]
    found = [tiled_s(job, (m, n, k), tile, batch=batch) for tile in tiles]
    assert min(found) == pytest.approx(float(equations_s(job, m, n, k, batch=batch)), rel=1e-12)


def test_split_sums_fill_a_device_and_cost_where_it_is_full() -> None:
    job = TrainingWork(planned().model, planned().devices, 1024, "fp8", global_batch=32)
    few, many = (64.0, 2112.0, 7168.0), (8192.0, 8192.0, 8192.0)
    assert tiled_s(job, few, (64, 128), splits=4) < 0.75 * tiled_s(job, few, (64, 128))
    assert tiled_s(job, many, (128, 128), splits=4) > tiled_s(job, many, (128, 128))
    assert tiled_s(job, many, (16, 16)) > 4 * tiled_s(job, many, (128, 128))


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_products_of_a_step_multiply_to_the_models_flops(tensor: int, recompute: str) -> None:
    """Over all ranks of a step, each of three passes is the formula; full recomputation adds one."""
    plan = planned(f"parallel.tensor={tensor}", f"parallel.recompute={recompute}", "parallel.pipeline=2")
    tokens = plan.training.global_batch * plan.training.sequence_length
    expected = tokens * matmul_flops_per_token(plan.model)
    ranks = plan.layout.mesh.world_size
    assert ranks * sum(calls * gemm.flops / gemm.alike for gemm, calls in counted(plan)) == pytest.approx(expected)
    flops = dict.fromkeys(PARTS, 0.0)
    for line in coverage(plan, Registry()).lines:
        if line.asked.product:
            m, n, k = line.asked.sides
            flops[line.asked.part] += 2.0 * m * n * k * line.asked.groups * line.asked.calls * ranks
    # Gradients of the fused loss come with it in 1F1B: logits are never computed again.
    head = 2.0 * tokens * plan.model.vocab * plan.model.hidden
    again = {"none": 0.0, "full": expected - head}[recompute]
    assert flops["forward"] == pytest.approx(expected + again)
    assert flops["input gradient"] == pytest.approx(expected)
    assert flops["weight gradient"] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["deepseek-v3-mi355x", "weipipe", "long-context-llama3-8b"])
def test_products_of_other_layouts_multiply_to_the_models_flops(name: str) -> None:
    """Experts by their mean rows, weights that go round, shared sequences."""
    loaded = load(ROOT / f"specs/{name}.yaml")
    assert loaded.spec is not None
    plan = deepseek() if name.startswith("deepseek") else make_plan(loaded.spec, base_dir=ROOT, default_name="t").plan
    assert plan is not None
    tokens = plan.training.global_batch * plan.training.sequence_length
    found = sum(calls * gemm.flops / gemm.alike for gemm, calls in counted(plan)) * plan.layout.mesh.world_size
    assert found == pytest.approx(tokens * matmul_flops_per_token(plan.model))


def test_rows_follow_tiles_and_pieces() -> None:
    """Networks in tiles and sums in pieces: fewer rows at once, as many in all."""
    fixed = ("parallel.pipeline=1", "parallel.recompute=none", "parallel.micro_batch=2")
    whole = line_of(coverage(planned(*fixed), Registry()), "ffn.down").asked
    tiled = line_of(coverage(planned(*fixed, "parallel.tiles.mlp=256"), Registry()), "ffn.down").asked
    assert (whole.sides[0], tiled.sides[0]) == (2048, 512)
    assert tiled.calls == 4 * whole.calls
    chunks = ("parallel.tensor.degree=2", "parallel.tensor.chunks=2", "parallel.tensor.overlap=none")
    pieces = coverage(planned(*fixed, *chunks), Registry())
    assert line_of(pieces, "attention.o").asked.sides[0] == 1024
    assert line_of(pieces, "attention.q").asked.sides[0] == 2048


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        run(["plan", *words, "--show", "kernels"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_tables_that_a_plan_file_names_may_be_missing_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    kernels = planned().kernels.model_copy(update={"tuned": [str(tmp_path / "gone")]})
    path = tmp_path / "plan.json"
    path.write_text(planned().model_copy(update={"kernels": kernels}).to_json())
    for output in ("text", "json"):
        with pytest.raises(SystemExit) as ended:
            run(["plan", str(path), "--show", "kernels", "--output", output])
        assert ended.value.code == 1
        assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [80, 100])
def test_the_view_fits_a_terminal_and_says_the_same_as_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(tmp_path)
    spec = Path("spec.yaml")
    spec.write_text(EIGHT)
    text = printed(capsys, str(spec))
    assert max(map(len, text.splitlines())) <= columns
    assert "gemm_a8w8" in text
    assert "heuristic" in text
    data = json.loads(printed(capsys, str(spec), "--output", "json"))
    assert data["architecture"] == "sm_90"
    assert data["tune"].startswith(f"partool tune {spec} --out ")
    assert data["tune"] in " ".join(text.split())
    assert sum(data["share"].values()) == pytest.approx(sum(line["share"] for line in data["lines"]))
