"""Offload in plans: the spec's settings, refusals and their numbers, values that are solved for, and costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from often import often
from planned import plan_of, result_of

from partool.catalog.hardware import resolve_hardware
from partool.cost.case import Layouts
from partool.cost.codec import encode
from partool.cost.training import host_state
from partool.cost.training.offload import chain, disk_rate, link_rate, offload
from partool.layout.parameters import count, parameters
from partool.plan.as_spec import own_yaml
from partool.plan.terms import HOST_TERMS
from partool.planner import queries
from partool.planner.explain.summary import summary
from partool.planner.queries import largest
from partool.planner.search.solve import harder_ones
from partool.spec import load_text
from partool.spec.hardware import HardwareSpec
from partool.spec.model import ModelConfig
from partool.spec.parallel import Offload
from partool.strategies.optimizers import OPTIMIZERS
from partool.work.training import TrainingWork

ONE_CPU = """\
model: {layers: 2, hidden: 64, heads: 4, vocab: 256}
hardware: {accelerator: cpu, per_node: 1}
data: python-stdlib
training: {sequence_length: 64, global_batch: 8, steps: 2}
"""
ONE_GPU = """\
model: {layers: 8, hidden: 2048, heads: 16, vocab: 32000}
hardware: {accelerator: h100-sxm, per_node: 1, host_memory_gib: 64}
data: python-stdlib
training: {sequence_length: 1024, global_batch: 4}
parallel: {recompute: full, micro_batch: 4, offload: {activations: none, parameters: none}}
"""


def offloaded(fields: str) -> str:
    return f"parallel.offload={{{fields}}}"


# From the spec to the plan.


def test_fields_are_those_of_the_spec() -> None:
    asked = (
        "optimizer: nvme, gpu_fraction: 0.25, speculate: undo, undo_gib: 0.5, gradients: fp32, moments: bf16, "
        "bucket_mib: 0.5, threads: 1, dir: state, buffers: 5, pinned_gib: 2"
    )
    layout = plan_of(ONE_CPU, "training.precision=bf16", offloaded(asked)).layout
    work = layout.offload
    assert (layout.offload.optimizer, layout.offload.gpu_fraction, layout.offload.parameters) == ("nvme", 0.25, "none")
    assert (work.speculate, work.undo_bytes, work.gradients, work.moments) == ("undo", 2**29, "fp32", "bf16")
    assert (work.bucket_bytes, work.threads, work.buffers, work.pinned_limit_bytes) == (2**19, 1, 5, 2**31)
    assert work.dir == "/base/state"
    assert layout.offload.active
    assert "optimizer 75% to disks" in summary(layout)


@pytest.mark.parametrize(
    "moved",
    often(
        ["parameters: cpu", "parameters: nvme, dir: state", "activations: cpu", "optimizer: cpu"],
        ["parameters: nvme, dir: state", "activations: cpu"],
    ),
)
def test_what_leaves_is_planned_on_several_devices(moved: str) -> None:
    """The table's rows for fewer devices also keep in host memory the states that the spec offloads."""
    plan = plan_of(ONE_GPU, "hardware.per_node=4", offloaded(moved), "parallel.recompute=auto")
    assert {row.devices for row in plan.candidates} > {4}
    if moved.startswith("parameters"):
        assert plan.layout.data.zero == 3


def test_what_is_open_follows_from_the_layout() -> None:
    """A single rank's gradients keep their type without loss; sums over ranks have the masters' type."""
    alone = plan_of(ONE_CPU, offloaded("optimizer: cpu")).layout
    assert (alone.offload.optimizer, alone.offload.gpu_fraction, alone.offload.dir) == ("cpu", 0.0, None)
    assert (alone.offload.speculate, alone.offload.gradients, alone.offload.moments) == (True, "bf16", "fp32")
    both = plan_of(ONE_CPU, offloaded("optimizer: cpu, speculate: false"), "hardware.per_node=2").layout
    assert (both.offload.speculate, both.offload.gradients) == (False, "fp32")
    # At least two of the node's cores for a rank's training.
    cores = plan_of(ONE_GPU, offloaded("optimizer: cpu, activations: none"), "hardware.host_cores=16").layout.offload
    assert cores.threads == 14
    assert not plan_of(ONE_CPU).layout.offload.active


def test_an_optimizer_without_a_host_pass_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    large = ("model.layers=140", "optimizer.name=sgd", "hardware.host_memory_gib=512")
    asked = [(ONE_GPU, "optimizer: cpu"), (ONE_CPU, "optimizer: nvme, dir: state"), (ONE_GPU, "parameters: cpu")]
    assert plan_of(ONE_GPU, *large).layout.offload.optimizer == "cpu"
    assert all(result_of(text, offloaded(fields), "optimizer.name=sgd").plan for text, fields in asked)
    monkeypatch.setitem(OPTIMIZERS, "sgd", replace(OPTIMIZERS["sgd"], host=False))
    assert result_of(ONE_GPU, *large).plan is None
    assert result_of(ONE_GPU, *large, offloaded("optimizer: auto, dir: /nvme")).plan is None
    for text, fields in asked:
        refused = load_text(text, overrides=[offloaded(fields), "optimizer.name=sgd"]).diagnostics
        assert [(found.code, found.path[:2]) for found in refused] == [("PT224", ("parallel", "offload"))]
        assert "adamw or lion or adagrad" in refused[0].help


@pytest.mark.parametrize(("text", "tier"), [(ONE_CPU, "cpu"), (ONE_CPU, "nvme"), (ONE_GPU, "nvme")])
def test_parameters_take_the_optimizer_with_them(text: str, tier: str) -> None:
    folder = ", dir: /nvme" if tier == "nvme" else ""
    plan = plan_of(text, offloaded(f"parameters: {tier}, activations: none{folder}"))
    layout = plan.layout
    assert (layout.data.zero, layout.offload.parameters, layout.offload.optimizer) == (3, tier, "cpu")
    assert layout.offload.gpu_fraction == 0.0
    assert layout.offload.dir == ("/nvme" if folder else None)
    assert plan.runnable
    assert plan.prediction.memory.host_terms_bytes["parameters"] > 0


def test_the_plan_is_what_its_own_words_ask_for() -> None:
    """A layout written as a section of a spec gives the same layout; the layout alone is enough to price it."""
    first = plan_of(ONE_GPU, offloaded("optimizer: nvme, dir: /nvme, activations: none"))
    section = yaml.safe_load(own_yaml(first))["parallel"]
    again = plan_of(ONE_GPU, f"parallel={json.dumps(section)}")
    assert again.layout == first.layout
    found = first.layout.offload
    assert (found.optimizer, found.speculate, found.buffers) == ("nvme", True, 4)


REFUSED = {
    "pinned": (ONE_GPU, "optimizer: cpu, pinned_gib: 0.1, gpu_fraction: 0", "PT473", "GiB that each rank needs"),
    "cores": (ONE_GPU, "optimizer: cpu, threads: 999", "PT474", "999"),
    "arena": (ONE_GPU, "optimizer: cpu, speculate: undo, undo_gib: 0.001", "PT488", "wait for the norm"),
    "all of it stays": (ONE_GPU, "optimizer: cpu, gpu_fraction: 1.0", "PT494", "on the device"),
    "one large bucket": (ONE_GPU, "optimizer: nvme, dir: /x, bucket_mib: 4096", "PT478", "hold all of the state"),
    "no memory apart": (ONE_CPU, "optimizer: cpu", "PT274", "saves nothing"),
}


@pytest.mark.parametrize(("text", "fields", "code", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_suffice_is_said(text: str, fields: str, code: str, words: str) -> None:
    found = [one for one in result_of(text, offloaded(f"{fields}, activations: none")).diagnostics if one.code == code]
    assert len(found) == 1
    assert words in found[0].message
    assert found[0].help


def test_a_disk_that_is_too_small_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = offloaded(f"optimizer: nvme, dir: {tmp_path}")
    assert result_of(ONE_CPU, fields).plan is not None
    monkeypatch.setattr(
        "partool.planner.findings.offload_room.shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})
    )
    (found,) = (one for one in result_of(ONE_CPU, fields).diagnostics if one.code == "PT487")
    assert found.severity == "error"
    assert str(tmp_path) in found.message


def test_shards_in_files_count_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = offloaded(f"optimizer: cpu, parameters: nvme, dir: {tmp_path}, activations: none")
    plan = plan_of(ONE_CPU, fields, "training.precision=bf16")
    assert (plan.layout.offload.optimizer, plan.layout.offload.parameters) == ("cpu", "nvme")
    size = 2 * count(parameters(plan.model))
    for free, codes in ((size, []), (size - 1, ["PT487"])):
        usage = type("Usage", (), {"free": free})
        monkeypatch.setattr("partool.planner.findings.offload_room.shutil.disk_usage", lambda _, usage=usage: usage)
        found = result_of(ONE_CPU, fields, "training.precision=bf16").diagnostics
        assert [one.code for one in found if one.code == "PT487"] == codes


def test_small_models_are_in_files_too() -> None:
    """The smallest buckets that are whole blocks: less than half of a model of 1.6 M parameters is in memory."""
    spec = (Path(__file__).parents[3] / "specs" / "quickstart-offload.yaml").read_text(encoding="utf-8")
    plan = plan_of(spec)
    kept = plan.prediction.memory.host_terms_bytes
    assert kept["masters"] + kept["moments"] < 0.35 * 12 * count(parameters(plan.model))
    assert plan.layout.offload.bucket_bytes == 2**18
    tiny = result_of(ONE_CPU, offloaded("optimizer: nvme, dir: /x"), "training.precision=bf16")
    (found,) = (one for one in tiny.diagnostics if one.code == "PT478")
    assert found.help == "use optimizer: cpu, which does as much without disks"


@pytest.mark.parametrize(
    ("text", "fields", "message", "help"),
    [
        (ONE_CPU, "pinned_gib: 0.0001", "pinned_gib: 0.0001 is less than the 0.0", "use pinned_gib: 0.0"),
        (ONE_GPU.replace("full", "none"), "pinned_gib: 0.1, activations: cpu", "activations", "or activations: none"),
    ],
)
def test_small_figures_are_figures(text: str, fields: str, message: str, help: str) -> None:
    (found,) = (d for d in result_of(text, offloaded(f"optimizer: cpu, {fields}")).diagnostics if d.code == "PT473")
    assert message in found.message
    assert help in found.help
    assert "bf16" not in found.help  # gradients are as narrow as computation already
    needed, suggested = (
        float(text.split()[0]) for text in (found.message.split("the ")[1], found.help.split(": ")[1].replace(",", ""))
    )
    assert needed * 0.995 <= suggested <= needed * 1.15


def test_copies_have_room_for_a_bucket() -> None:
    """If the spec leaves it open, small models also have copies to restore a bucket from."""
    for text in (ONE_CPU, ONE_GPU):
        result = result_of(text, offloaded("optimizer: cpu, speculate: undo, activations: none, gpu_fraction: 0"))
        assert result.plan is not None
        assert "PT488" not in [one.code for one in result.diagnostics]
        assert result.plan.layout.offload.undo_bytes >= 2**20


def test_a_folder_that_is_not_there_is_said_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only if the planning machine is the training one; folders of other machines are unknown."""
    file = tmp_path / "file"
    file.touch()

    def found(text: str, folder: Path) -> list[tuple[str, str]]:
        result = result_of(text, offloaded(f"optimizer: nvme, dir: {folder}, activations: none"))
        assert result.plan is not None
        return [(one.code, one.message) for one in result.diagnostics if one.code in ("PT667", "PT668")]

    assert found(ONE_CPU, tmp_path) == found(ONE_GPU, tmp_path / "none") == []
    assert found(ONE_CPU + "\nlaunch: {target: slurm}\n", tmp_path / "none") == []
    assert found(ONE_CPU, tmp_path / "none") == [("PT667", f"{tmp_path}/none does not exist on this machine")]
    assert found(ONE_CPU, file) == [("PT667", f"{file} is not a folder on this machine")]
    monkeypatch.setattr("partool.planner.rules.offload.os.access", lambda *_: False)
    assert found(ONE_CPU, tmp_path) == [("PT668", f"{tmp_path} cannot be written on this machine")]


# Where each state is kept.


def test_host_memory_by_term() -> None:
    plan = plan_of(ONE_GPU, offloaded("optimizer: cpu, gpu_fraction: 0, activations: none"))
    elements = count(parameters(plan.model))
    terms = plan.prediction.memory.host_terms_bytes
    bucket = plan.layout.offload.bucket_bytes
    assert list(terms) == [name for name in HOST_TERMS if name in terms]
    assert terms["masters"] == pytest.approx(4 * elements, rel=1e-6)
    assert terms["moments"] == pytest.approx(8 * elements, rel=1e-6)
    # Each gradient waits for the norm, and two more buckets are in flight.
    assert terms["gradients"] == pytest.approx(2 * elements + 2 * bucket, rel=1e-6)
    assert terms["weights"] == 2 * bucket
    memory = plan.prediction.memory
    assert memory.pinned_bytes == terms["gradients"] + terms["weights"]
    assert memory.host_bytes == pytest.approx(sum(terms.values()), rel=1e-6)
    assert memory.terms_bytes["optimizer"] == 0
    device = plan_of(ONE_GPU, offloaded("optimizer: none, activations: none")).prediction.memory
    assert device.terms_bytes["parameters"] == pytest.approx(2 * memory.terms_bytes["parameters"], rel=1e-6)
    assert (device.host_terms_bytes, device.host_bytes, device.pinned_bytes) == ({}, 0, 0)
    adds = plan_of(ONE_GPU, offloaded("optimizer: cpu, gpu_fraction: 0, activations: none"), "parallel.micro_batch=1")
    several = adds.prediction.memory.host_terms_bytes
    assert several["totals"] == pytest.approx(4 * elements, rel=1e-6)
    assert several["gradients"] == 2 * bucket
    disk = plan_of(ONE_GPU, offloaded("optimizer: nvme, dir: /nvme, gpu_fraction: 0, activations: none"))
    kept = disk.prediction.memory.host_terms_bytes
    assert kept["masters"] + kept["moments"] == 4 * 12 * disk.layout.offload.bucket_bytes // 2
    assert disk.prediction.time.step_time_s > plan.prediction.time.step_time_s


def test_frozen_parameters_have_no_masters() -> None:
    """Host memory and files hold the state of what is trained only."""
    for tier in ("cpu", "nvme, dir: /nvme"):
        fields = [offloaded(f"optimizer: {tier}, gpu_fraction: {share}, activations: none") for share in (0, 0.5)]
        trained, *both = (plan_of(ONE_GPU, one, *more) for one, more in (
            (fields[0], []), (fields[0], ["model.frozen=[layers.*]"]), (fields[1], ["model.frozen=[layers.*]"]),
        ))  # fmt: skip
        frozen = count(parameters(trained.model)) - count(
            one for one in parameters(trained.model) if not one.name.startswith("layers.")
        )
        for plan in both:
            terms, host = plan.prediction.memory.host_terms_bytes, 1 - plan.layout.offload.gpu_fraction
            tail = host * (count(parameters(trained.model)) - frozen)
            kept = (
                tail if tier == "cpu" else min(tail, plan.layout.offload.buffers * plan.layout.offload.bucket_bytes / 2)
            )
            assert terms["masters"] == pytest.approx(4 * kept, rel=1e-3)


def test_steps_that_clip_are_priced_in_words() -> None:
    """The price assumes correct speculation; the time of a step without it equals that of a plan with it disabled."""
    fields = "optimizer: cpu, gpu_fraction: 0, activations: none, bucket_mib: 4"
    guessing, waiting = (plan_of(ONE_GPU, offloaded(f"{fields}, speculate: {on}")) for on in ("true", "false"))
    words = f"updates wait for the norm: {waiting.prediction.time.step_time_s:.3g} s a step"
    assert waiting.prediction.time.step_time_s > guessing.prediction.time.step_time_s
    assert [words in " ".join(plan.reasons) for plan in (guessing, waiting)] == [True, False]
    never = plan_of(ONE_GPU, offloaded(fields), "optimizer.clip=0")
    assert "updates wait" not in " ".join(never.reasons)


def test_optimizers_with_one_moment_take_less() -> None:
    moments = [
        plan_of(ONE_GPU, offloaded("optimizer: cpu, gpu_fraction: 0, activations: none"), f"optimizer.name={name}")
        .prediction.memory.host_terms_bytes["moments"]
        for name in ("adamw", "lion")
    ]  # fmt: skip
    assert moments[0] == 2 * moments[1]


def test_files_are_taken_where_host_memory_is_short() -> None:
    """Host memory is used first, then files, and those only if a folder is given."""
    short = ("hardware.memory_gib=6", "hardware.host_memory_gib=3", "hardware.nvme_gb_per_s=2")
    refused = result_of(ONE_GPU, *short, offloaded("activations: none, parameters: none"))
    assert refused.plan is None
    assert [one.code for one in refused.diagnostics if one.severity == "error"] == ["PT301"]
    assert any("nvme" in one.help for one in refused.diagnostics)
    files = plan_of(ONE_GPU, *short, offloaded("activations: none, parameters: none, dir: /nvme"))
    assert files.layout.offload.optimizer == "nvme"
    assert files.layout.offload.dir == "/nvme"
    assert any("files under /nvme" in reason for reason in files.reasons)


def test_a_state_may_be_on_both_sides() -> None:
    """State that does not fit in host memory stays on the device, although the spec asks for the host."""
    fields = offloaded("optimizer: cpu, activations: none, parameters: none")
    plan = plan_of(ONE_GPU, "hardware.host_memory_gib=5", fields)
    assert plan.layout.offload.gpu_fraction >= 0.25
    assert plan.prediction.memory.host_bytes <= 0.9 * 5 * 2**30


def test_the_largest_model_that_fits() -> None:
    def layers(*fields: str) -> int:
        loaded = load_text(ONE_GPU, overrides=["hardware.memory_gib=16", "hardware.host_memory_gib=24", *fields])
        assert loaded.spec is not None
        found = largest(loaded.spec, Path("/base"), "model")
        assert found is not None
        return int(found[0].removeprefix("model.layers="))

    device = layers(offloaded("optimizer: none, activations: none, parameters: none"))
    host = layers(offloaded("optimizer: cpu, activations: none, parameters: none"))
    files = layers(offloaded("optimizer: nvme, dir: /nvme, activations: none, parameters: none"))
    assert device < host < files


@pytest.mark.parametrize("limit", often([[], ["parallel.offload.pinned_gib=4"]], [["parallel.offload.pinned_gib=4"]]))
def test_no_larger_model_plans(limit: list[str]) -> None:
    """Partly offloaded activations are among the layouts, and memory rules hold."""
    machine = ["hardware.memory_gib=16", "hardware.host_memory_gib=24", "parallel.offload.activations=auto", *limit]
    loaded = load_text(ONE_GPU, overrides=machine)
    assert loaded.spec is not None
    found = largest(loaded.spec, Path("/base"), "model")
    assert found is not None
    layers = int(found[0].removeprefix("model.layers="))
    assert result_of(ONE_GPU, *machine, f"model.layers={layers}").plan is not None
    more = result_of(ONE_GPU, *machine, f"model.layers={layers + 1}").plan
    assert more is None or more.prediction.memory.verdict != "green"


def test_the_largest_is_found_from_a_poor_guess() -> None:
    for true in (0, 1, 2, 7, 100):
        for guess in (1, 3, 7, 90, 100, 128):
            assert queries._pushed(lambda n, true=true: n <= true, guess, 100) == (true or None)


# Costs.

GPU = resolve_hardware(HardwareSpec(accelerator="h100-sxm", per_node=1), "bf16").devices
MODEL = ModelConfig(layers=4, hidden=512, ffn_hidden=2048, heads=8, kv_heads=8, head_dim=64, vocab=1000)


def job(**changes: Any) -> TrainingWork:
    assert GPU is not None
    return TrainingWork(MODEL, GPU, 1024, "bf16", global_batch=8, offload=Offload(**changes))


def test_a_step_is_the_slowest_part_with_one_bucket_of_lag() -> None:
    """With speculation the update overlaps the backward pass; without, all of it follows the norm."""
    elements, layouts = 1e9, Layouts(gpu_fraction=0.0)
    parts = chain(job(), layouts, elements)
    assert parts.down_s == pytest.approx(2e9 / link_rate(job()))
    assert parts.up_s == parts.down_s
    assert parts.lag_s == pytest.approx(2**26 / 2e9 * (parts.down_s + parts.update_s + parts.up_s))

    def shown(backward_s: float, **changes: Any) -> float:
        one = offload(job(**changes), layouts, elements, saved_bytes=0.0, passes_s=9.0, last_s=backward_s)
        return float(one.exposed_s)

    slow = 5.0 * float(parts.update_s)
    assert shown(slow) == pytest.approx(parts.lag_s)
    assert shown(0.0) == pytest.approx(max(parts.update_s, parts.down_s) + parts.lag_s)
    late = chain(job(speculate=False), layouts, elements)
    assert shown(slow, speculate=False) == pytest.approx(max(late.update_s, late.up_s) + late.lag_s)
    assert late.update_s < parts.update_s


def test_disks_read_and_write_the_state_once_a_step() -> None:
    files = job(optimizer="nvme")
    found = chain(files, Layouts(gpu_fraction=0.0), 1e9)
    assert found.disk_s == pytest.approx(24e9 / disk_rate(files))
    narrow = chain(job(optimizer="nvme", moments="bf16"), Layouts(gpu_fraction=0.0), 1e9)
    assert narrow.disk_s == pytest.approx(16e9 / disk_rate(files))


def test_which_gradients_the_host_adds_up() -> None:
    """As in the runtime: after each micro-batch if they are reduced after each, else once."""
    rows = Layouts(
        accumulation=np.array([1, 4, 4, 4, 4, 4]),
        shards=np.array([1, 1, 2, 2, 2, 1]),
        replicas=np.array([1, 1, 1, 1, 2, 1]),
        zero=np.array([0, 0, 2, 1, 2, 0]),
        pp=np.array([1, 1, 1, 1, 1, 2]),
    )
    assert host_state.accumulates(rows).tolist() == [False, True, True, False, False, False]
    assert host_state.waits_on_device(rows).tolist() == [False, False, False, True, True, True]
    assert host_state.wire_bytes(job(), rows).tolist() == [2, 2, 4, 4, 4, 4]


def test_harder_problems_save_more_and_more() -> None:
    from partool.planner.resolve import resolve

    spec = load_text(ONE_GPU, overrides=[offloaded("optimizer: auto, dir: /nvme")]).spec
    assert spec is not None
    problem = resolve(spec, Path("/base")).problem
    assert problem is not None
    found = list(harder_ones(problem))
    assert "disks" in found[-1].relaxed
    on_disks = ["disks" in one.relaxed for one in found]
    assert on_disks == sorted(on_disks)
    assert len(found) == len({id(one) for one in found})
    assert encode(plan_of(ONE_GPU, offloaded("optimizer: nvme, dir: /nvme")).layout).gpu_fraction < 1
