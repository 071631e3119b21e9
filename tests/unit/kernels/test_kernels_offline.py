"""Every kernel on every architecture: it compiles, fits and uses the units it is meant to."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from partool_kernels import modelled, proof
from partool_kernels.compiled import Compiled, compile_for
from partool_kernels.device import triton_version
from partool_kernels.modelled import missing
from partool_kernels.offline import main
from partool_kernels.proof import Proof, ProofJob, faults, jobs, prove, prove_all
from partool_kernels.registry import ARCHITECTURES, KERNELS, Config, Request
from partool_kernels.registry.tables import Measured, path_of, read, write

PLACES = [(kernel, architecture) for kernel in KERNELS for architecture in ARCHITECTURES]
FITS = Compiled(shared_bytes=1024, registers=32, spilled_bytes=0, matrix=True, emulates_fp8=False)


def bad(work: list[ProofJob]) -> list[tuple[ProofJob, tuple[str, ...]]]:
    return [(found.job, found.faults) for found in map(prove, work) if found.faults]


@pytest.mark.parametrize(("kernel", "architecture"), PLACES)
def test_what_the_registry_answers_can_run(kernel: str, architecture: str) -> None:
    assert bad(list(islice(jobs(kernel, architecture), 1))) == []


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kernel", "architecture"), PLACES)
def test_all_entries_and_types_can_run(kernel: str, architecture: str) -> None:
    assert bad(list(jobs(kernel, architecture, all_types=True))) == []


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_kernel_is_left_out(kernel: str) -> None:
    assert [name for name in ARCHITECTURES if next(jobs(kernel, name), None) is not None]


def some_job(architecture: str = "sm_90") -> ProofJob:
    return next(jobs("glu_forward", architecture))


@pytest.mark.parametrize(
    ("compiled", "words"),
    [
        (FITS, ""),
        (replace(FITS, shared_bytes=64 * 1024), ""),
        (replace(FITS, shared_bytes=64 * 1024 + 1), "needs 65537 bytes of shared memory, gfx942 has 65536"),
        (replace(FITS, spilled_bytes=4), ""),
        (replace(FITS, spilled_bytes=5), "spills 5 bytes per thread, 4 are on record"),
        (replace(FITS, matrix=False), "none of v_mfma_"),
        (replace(FITS, emulates_fp8=True), "wider ones"),
    ],
)
def test_each_limit_is_held(monkeypatch: pytest.MonkeyPatch, compiled: Compiled, words: str) -> None:
    monkeypatch.setitem(KERNELS, "glu_forward", replace(KERNELS["glu_forward"], matrix=True))
    found = faults(some_job("gfx942")._replace(spilled_bytes=4), compiled)
    assert [words in fault for fault in found] == ([True] if words else [])


@pytest.mark.parametrize(
    ("architecture", "dtype", "flags", "fault"),
    [
        ("sm_90", "float32", (), False),
        ("sm_90", "float32", ("tf32",), True),
        ("sm_90", "bfloat16", (), True),
        ("gfx942", "float32", (), True),
    ],
)
def test_products_of_float32_as_they_are_need_no_matrix_units_on_nvidia(
    architecture: str, dtype: str, flags: tuple[str, ...], fault: bool
) -> None:
    example = next(KERNELS["gemm"].examples(architecture))
    request = replace(example, dtypes=(dtype, dtype), flags=(*flags, *example.flags))
    job = ProofJob(request, KERNELS["gemm"].default(request))
    assert bool(faults(job, replace(FITS, matrix=False))) is fault


def test_an_estimate_that_hides_what_fits_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    job, large = some_job(), replace(KERNELS["glu_forward"], shared_bytes=lambda request, config: 300_000)
    monkeypatch.setitem(KERNELS, "glu_forward", large)
    (fault,) = faults(job, FITS)
    assert "look-ups pass it over: 300000 bytes" in fault


def test_real_spills_are_seen() -> None:
    """A wide row in the registers of two warps spills."""
    wide = some_job()._replace(config=Config((("BLOCK", 16384),), num_warps=2, num_stages=1))
    found = prove(wide)
    assert found.compiled is not None
    assert found.compiled.spilled_bytes > 0
    assert "spills" in found.faults[0]
    assert prove(wide._replace(spilled_bytes=found.compiled.spilled_bytes)).faults == ()


def test_real_needs_beyond_shared_memory_are_seen() -> None:
    """Triton compiles such configurations; only their launch would fail."""
    request = next(KERNELS["gemm"].examples("gfx942"))
    blocks = (("BLOCK_M", 128), ("BLOCK_N", 128), ("BLOCK_K", 128), ("GROUP_M", 8), ("SPLIT", 1))
    found = prove(ProofJob(request, Config(blocks, num_warps=8, num_stages=4), spilled_bytes=None))
    assert found.compiled is not None
    assert found.compiled.shared_bytes > ARCHITECTURES["gfx942"].shared_bytes
    assert "gfx942 has 65536" in found.faults[0]


@pytest.mark.filterwarnings("ignore:fp8e4b8")
@pytest.mark.parametrize(
    ("architecture", "dtype", "words"),
    [
        ("gfx942", "float8_e4m3fnuz", ""),
        ("gfx950", "float8_e4m3fn", ""),
        ("sm_90", "float8_e4m3fn", ""),
        ("gfx942", "float8_e4m3fn", "turns 8-bit products into wider ones"),
        ("gfx950", "float8_e4m3fnuz", "turns 8-bit products into wider ones"),
        ("sm_80", "float8_e4m3fn", "does not compile"),
    ],
)
def test_the_other_flavour_of_eight_bits_is_seen(architecture: str, dtype: str, words: str) -> None:
    shape = (("n", 4096), ("k", 4096))
    request = Request("gemm_a8w8", architecture, (dtype, "bfloat16"), shape, 4096)
    found = prove(ProofJob(request, KERNELS["gemm_a8w8"].default(request), spilled_bytes=None))
    assert [words in fault for fault in found.faults] == ([True] if words else [])


def resident_warps(registers: int, shared_bytes: int, warps: int) -> tuple[int, int]:
    """Return how many blocks of a program, and how many warps of these, a multiprocessor of sm_90 or sm_100 holds.

    Limits: "CUDA C++ Programming Guide", compute capabilities. A warp takes registers in units of 256, a block takes
    1 KiB of shared memory for the system.
    """
    of_warp = -(-registers * 32 // 256) * 256
    blocks = min(65536 // (of_warp * warps), 64 // warps, 32, 228 * 1024 // (shared_bytes + 1024))
    return blocks, blocks * warps


@pytest.mark.parametrize(("registers", "warps", "blocks"), [(139, 8, 1), (128, 8, 2), (126, 16, 1), (60, 8, 4)])
def test_registers_limit_resident_blocks(registers: int, warps: int, blocks: int) -> None:
    assert resident_warps(registers, 16384, warps) == (blocks, blocks * warps)


@pytest.mark.parametrize("flags", ["plain", "turned", "plain turned", "plain square", "square turned"])
@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
def test_several_blocks_that_quantise_share_a_processor(architecture: str, flags: str) -> None:
    """The kernel is bound by memory: one block reads while another converts or writes."""
    pytest.importorskip("triton.compiler", reason="Triton's compiler is not installed")
    examples = KERNELS["fp8_quantise"].examples(architecture)
    request = next(each for each in examples if each.flags == tuple(flags.split()))
    config = KERNELS["fp8_quantise"].default(request)
    found = compile_for(request, config)
    entries = read(path_of("fp8_quantise", architecture)).entries
    needs = [one for each in entries if each.flags == request.flags for one in each.resources.values()]
    assert needs
    for need in (found, *needs):
        blocks, warps = resident_warps(need.registers, need.shared_bytes, config.num_warps)
        assert (blocks >= 2, warps >= 32, need.spilled_bytes) == (True, True, 0), need


def test_a_kernel_without_products_has_no_matrix_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS, "glu_forward", replace(KERNELS["glu_forward"], matrix=True))
    for architecture in ARCHITECTURES:
        (fault,) = prove(some_job(architecture)).faults
        assert "has none of" in fault


def test_what_does_not_compile_is_told_and_the_rest_goes_on() -> None:
    job = some_job()
    odd = job._replace(config=Config((("BLOCK", 1000),), num_warps=4, num_stages=1))
    first, second = prove_all([odd, job], 1)
    assert first.compiled is None
    assert "does not compile" in first.faults[0]
    assert second.faults == ()


def dies(job: ProofJob) -> Proof:
    if job.spilled_bytes == 13:
        os._exit(11)
    return Proof(job, FITS, ())


def test_a_compiler_that_ends_its_process_costs_only_its_own_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "prove", dies)
    work = [some_job()._replace(spilled_bytes=number) for number in (1, 13, 3)]
    found = list(prove_all(work, 2))
    assert [one.job.spilled_bytes for one in found] == [1, 13, 3]
    assert [one.faults for one in found] == [(), ("its compiler ends the process",), ()]


@pytest.mark.parametrize("kernel", KERNELS)
def test_typical_requests_have_entries(kernel: str) -> None:
    """If this fails, run ``make kernel-tables``."""
    assert missing([kernel]) == []


def test_modelled_entries_are_written_and_measured_ones_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(modelled, "path_of", lambda kernel, architecture: path_of(kernel, architecture, tmp_path))
    assert len(missing(["glu_forward"])) == 2 * len(ARCHITECTURES)
    assert list(modelled.model(["glu_forward"], ["gfx942"], 1)) == [("glu_forward", "gfx942", 2)]
    assert {request.architecture for request in missing(["glu_forward"])} == {*ARCHITECTURES} - {"gfx942"}
    path = path_of("glu_forward", "gfx942", tmp_path)
    table, version = read(path), triton_version()
    first = table.entries[0]
    found = Measured(
        time_s=1e-4, default_s=2e-4, reference_s=3e-4, reference="torch", error=0.5, repeats=20, tried=3,
        date="2026-01-31", driver="1", torch="2.13.0", triton="3.9.0",
    )  # fmt: skip
    named = {"device": "a device", "units": 8, "status": "measured", "measured": found}
    write(table.merged([first.model_copy(update=named), first.model_copy(update={"shape": {"f": 64}})]), path)
    list(modelled.model(["glu_forward"], ["gfx942"], 1))
    assert [(entry.status, entry.shape["f"]) for entry in read(path).entries] == [
        ("modelled", 8192), ("measured", 8192), ("modelled", 14336)
    ]  # fmt: skip
    monkeypatch.setattr(modelled, "triton_version", lambda: "3.6")  # an older Triton adds its resources
    list(modelled.model(["glu_forward"], ["gfx942"], 1))
    first, second, _ = read(path).entries
    assert (first.triton, {*first.resources}, {*second.resources}) == (version, {"3.6", version}, {version})
    monkeypatch.setattr(modelled, "triton_version", lambda: version)  # the newest keeps older ones' data
    list(modelled.model(["glu_forward"], ["gfx942"], 1))
    assert {*read(path).entries[0].resources} == {"3.6", version}


def test_where_the_rule_has_a_fault_another_configuration_is_modelled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(modelled, "path_of", lambda kernel, architecture: path_of(kernel, architecture, tmp_path))
    spills = replace(KERNELS["glu_forward"], default=lambda request: Config((("BLOCK", 16384),), 2, 1))
    monkeypatch.setitem(KERNELS, "glu_forward", spills)
    monkeypatch.setattr(modelled, "prove_all", lambda work, processes: map(prove, work))
    list(modelled.model(["glu_forward"], ["sm_90"], 1))
    (first, second) = read(path_of("glu_forward", "sm_90", tmp_path)).entries
    assert {needs.spilled_bytes for entry in (first, second) for needs in entry.resources.values()} == {0}
    assert first.config.blocks["BLOCK"] < 16384


def test_programs_that_differ_in_numbers_only_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(list(KERNELS["glu_forward"].examples("sm_90"))) == 2
    assert len(list(jobs("glu_forward", "sm_90"))) == 1
    assert len(list(jobs("glu_forward", "sm_90", all_types=True))) == 3


def test_the_command_tells_what_it_found(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["glu_forward", "--architectures", "sm_80", "gfx950", "--processes", "1", "--most", "9"]
    assert main(arguments) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["programs"] == len(told["results"]) >= 2
    assert told["faults"] == 0
    assert {one["needs"]["spilled_bytes"] for one in told["results"]} == {0}
    bad = replace(KERNELS["glu_forward"], default=lambda request: Config((("BLOCK", 1000),), num_warps=1))
    monkeypatch.setitem(KERNELS, "glu_forward", bad)
    monkeypatch.setattr("partool_kernels.offline.prove_all", lambda work, processes: map(prove, work))
    assert main(arguments) == 1
    assert "does not compile" in capfd.readouterr().err
