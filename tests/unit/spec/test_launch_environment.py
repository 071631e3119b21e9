"""The environment of ranks: presets with sources, precedence, variables never in it; and site profiles in plans."""

from __future__ import annotations

import io
import json
import re
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any, get_args

import pytest
from _spec_case import planned, spec_text
from rich.console import Console

from partool.catalog.hardware import resolve_hardware
from partool.catalog.lookup import table
from partool.catalog.network import network_environment, preset_of
from partool.cli.main import run
from partool.plan.run import rank_environment
from partool.plan.types import Plan
from partool.planner.rules.launching import environment
from partool.report import environment as report
from partool.report import render_plan
from partool.spec.hardware import Devices, HardwareSpec
from partool.spec.launch import LaunchSpec, NetworkPreset, Secret
from partool.spec.targets.slurm.section import SlurmSpec

ALLOCATOR = "PYTORCH_ALLOC_CONF"
PRESETS: list[NetworkPreset] = [name for name in get_args(NetworkPreset) if name not in ("auto", "none")]


def machines(accelerator: str = "h100-sxm", nodes: int = 2, fabric: str | None = None, **fields: Any) -> Devices:
    spec = HardwareSpec.model_validate({"accelerator": accelerator, "nodes": nodes, "fabric": fabric, **fields})
    devices = resolve_hardware(spec, "bf16").devices
    assert devices is not None
    return devices


def values(launch: LaunchSpec, devices: Devices) -> dict[str, str]:
    """Return the variables without that of torch's allocator, which has tests of its own."""
    return {variable.name: variable.value for variable in environment(launch, devices) if variable.name != ALLOCATOR}


def test_every_fabric_of_the_catalog_has_a_preset_and_every_preset_a_fabric() -> None:
    assert {preset_of(fabric) for fabric in table("fabrics")} == set(PRESETS)
    assert set(table("network_env")["presets"]) == set(PRESETS)
    assert preset_of("") == ""


def test_every_variable_has_a_reason_and_a_page_with_its_date() -> None:
    data = table("network_env")
    used = set()
    for rows in data["presets"].values():
        for row in rows:
            assert set(row) <= {"name", "value", "why", "source", "backends", "accelerators"}
            assert re.fullmatch(r"[A-Z][A-Z0-9_]+", row["name"])
            assert len(row["why"]) > 20
            used.add(row["source"])
    assert used == set(data["sources"])
    for source in data["sources"].values():
        assert source["url"].startswith("https://")
        year, month = map(int, source["as_of"].split("-"))
        assert date(2026, 1, 1) <= date(year, month, 1) <= date(2026, 11, 30)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_choose_the_network_so_that_nothing_falls_back_in_silence(preset: NetworkPreset) -> None:
    found = values(LaunchSpec(network=preset), machines())
    network = {"ib": "IB", "roce": "IB", "efa": "AWS Libfabric", "slingshot": "AWS Libfabric", "tcp": "Socket"}
    assert found["NCCL_NET"] == network[preset]
    assert len(found) <= 10, "a wrong variable is worse than none"


def test_auto_goes_by_the_fabric_and_one_node_needs_nothing() -> None:
    auto = LaunchSpec(network="auto")
    for fabric in table("fabrics"):
        devices = machines(fabric=fabric)
        assert devices.fabric == fabric
        named = LaunchSpec(network=preset_of(fabric))  # type: ignore[arg-type]
        assert values(auto, devices) == values(named, devices) != {}
        assert values(auto, machines(nodes=1, fabric=fabric)) == {}
    assert values(LaunchSpec(), machines()) == {}
    assert values(auto, machines("mi300x"))["NCCL_NET"] == "IB", "RCCL reads the same names"


def test_ranks_on_a_cpu_get_threads_and_no_variables_of_nccl() -> None:
    devices = machines("cpu", per_node=2)
    for preset in ("ib", "auto", "none"):
        found = environment(LaunchSpec.model_validate({"network": preset}), devices)
        assert [variable.name for variable in found] == ["OMP_NUM_THREADS"]
        assert found[0].value == str(devices.threads_per_rank)


def test_only_the_machines_that_need_it_get_a_variable() -> None:
    remedy = {"FI_CXI_RDZV_THRESHOLD", "FI_CXI_RDZV_GET_MIN"}

    def names(accelerator: str) -> set[str]:
        return {row.name for row in network_environment("slingshot", machines(accelerator))}

    assert remedy <= names("gh200-96")
    assert not remedy & names("a100-80")
    assert "HSA_FORCE_FINE_GRAIN_PCIE" in names("mi250x") - names("a100-80")


def test_the_users_own_value_wins_and_every_name_is_there_once() -> None:
    launch = LaunchSpec(network="slingshot", env={"NCCL_CROSS_NIC": "0", "A": "b"})
    found = environment(launch, machines("gh200-96"))
    names = [variable.name for variable in found]
    assert names == sorted(set(names))
    origins = {variable.name: (variable.value, variable.origin) for variable in found}
    assert origins["NCCL_CROSS_NIC"] == ("0", "launch.env")
    assert origins["A"] == ("b", "launch.env")
    value, origin = origins["NCCL_NET"]
    assert value == "AWS Libfabric"
    assert origin.startswith("network preset slingshot (https://")


def test_a_secret_is_only_named() -> None:
    launch = LaunchSpec(target="slurm", network="ib", secrets={"NCCL_NET": Secret(file="/x"), "T": Secret(file="/y")})
    assert [variable.name for variable in environment(launch, machines())] == [ALLOCATOR]


NETWORKED = """\
launch:
  target: slurm
  network: auto
  env: {WANDB_MODE: offline}
  secrets: {HF_TOKEN: {file: tokens/hf}}
  slurm: {profile: site.yaml, qos: long, options: {network: disable_rdzv_get}}
"""
SITE = """\
partition: gpu
qos: normal
setup: modules.sh
exclusive: false
options: {network: none, mail-type: END}
"""


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "site.yaml").write_text(SITE, encoding="utf-8")
    return planned(spec_text(NETWORKED.replace("site.yaml", "sites/site.yaml"), nodes=2), tmp_path)


def test_a_plan_holds_the_environment_and_its_ranks_get_it(plan: Plan) -> None:
    assert {variable.name: variable.value for variable in plan.environment} == {
        "NCCL_NET": "IB",
        ALLOCATOR: "expandable_segments:True",
        "WANDB_MODE": "offline",
    }
    assert Plan.from_json(plan.to_json()).environment == plan.environment
    ranks = rank_environment(plan)
    assert (ranks["NCCL_NET"], ranks["WANDB_MODE"]) == ("IB", "offline")
    assert plan.hash != plan.model_copy(update={"environment": ()}).hash


def test_a_plan_holds_what_the_site_profile_says_and_the_spec_wins(plan: Plan, tmp_path: Path) -> None:
    slurm, folder = plan.launch.slurm, tmp_path / "sites"
    assert (slurm.partition, slurm.qos, slurm.exclusive) == ("gpu", "long", False)
    assert slurm.setup == str(folder / "modules.sh"), "from the profile's own folder"
    assert slurm.options == {"network": "disable_rdzv_get", "mail-type": "END"}
    assert slurm.profile == str(folder / "site.yaml")
    assert plan.launch.secrets["HF_TOKEN"].file == str(tmp_path / "tokens/hf")
    again = planned(spec_text(NETWORKED.replace("site.yaml", "sites/site.yaml"), nodes=2), tmp_path)
    assert again.hash == plan.hash
    (folder / "site.yaml").write_text(SITE + "# the same\n", encoding="utf-8")
    moved = planned(spec_text(NETWORKED.replace("site.yaml", "sites/site.yaml"), nodes=2), tmp_path)
    assert moved.hash == plan.hash
    assert moved.inputs["launch/slurm/profile"] != plan.inputs["launch/slurm/profile"]


def test_values_are_shown_with_who_decided_them(plan: Plan, tmp_path: Path) -> None:
    assert report.environment_rows(plan)[0] == {
        "name": "HF_TOKEN",
        "value": f"(secret: the file {tmp_path / 'tokens/hf'})",
        "origin": "launch.secrets",
    }
    decided = {row["name"]: row["value"] for row in report.site_rows(plan)}
    assert decided == {
        "launch.slurm.partition": "gpu",
        "launch.slurm.exclusive": False,
        "launch.slurm.setup": str(tmp_path / "sites" / "modules.sh"),
        "launch.slurm.options.mail-type": "END",
    }
    out = io.StringIO()
    report.render_environment(plan, Console(file=out, width=400))
    lines = out.getvalue().splitlines()
    assert any(re.fullmatch(r"NCCL_NET +IB +network preset ib *", line) for line in lines)
    assert any(line.startswith("NCCL_NET: without InfiniBand") and "https://docs.nvidia.com" in line for line in lines)
    assert any("launch.slurm.partition" in line and str(tmp_path) in line for line in lines)
    out = io.StringIO()
    render_plan(plan, Console(file=out, width=200))
    assert "NCCL_NET (network preset ib); WANDB_MODE (launch.env)" in out.getvalue()


def test_nothing_is_said_of_an_environment_that_is_empty(tmp_path: Path) -> None:
    full = planned(spec_text(""), tmp_path)
    assert report.summary(full) == ""
    bare = full.model_copy(update={"environment": ()})
    assert report.summary(bare) == ""
    out = io.StringIO()
    report.render_environment(bare, Console(file=out, width=100))
    assert "nothing is set" in out.getvalue()


def test_control_characters_of_a_value_do_not_reach_the_terminal(tmp_path: Path) -> None:
    text = 'launch: {env: {A: "\\e[31mred\\n[bold]x"}}\n'
    out = io.StringIO()
    report.render_environment(planned(spec_text(text), tmp_path), Console(file=out, width=100))
    assert "\x1b" not in out.getvalue()
    assert "[bold]x" in out.getvalue()


def test_the_command_prints_the_environment_as_text_and_as_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site.yaml").write_text(SITE, encoding="utf-8")
    spec = tmp_path / "mine.yaml"
    spec.write_text(spec_text(NETWORKED, nodes=2), encoding="utf-8")

    def printed(*more: str) -> str:
        with suppress(SystemExit):
            run(["plan", str(spec), "--show", "environment", *more])
        return capsys.readouterr().out

    data = json.loads(printed("--output", "json"))
    assert [row["name"] for row in data["environment"]] == ["HF_TOKEN", "NCCL_NET", ALLOCATOR, "WANDB_MODE"]
    assert {row["origin"] for row in data["site_profile"]} == {f"site profile {tmp_path / 'site.yaml'}"}
    text = printed()
    assert "Environment of every rank" in text
    assert "From the site profile" in text


def test_a_field_that_the_spec_empties_is_not_filled_by_the_profile(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(SITE, encoding="utf-8")
    section = "launch: {slurm: {profile: site.yaml, partition: ~, exclusive: true}}\n"
    slurm = planned(spec_text(section), tmp_path).launch.slurm
    assert (slurm.partition, slurm.exclusive, slurm.qos) == (None, True, "normal")
    assert slurm == SlurmSpec.model_validate(slurm.model_dump())


def test_a_tilde_is_the_home_of_who_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "site.yaml").write_text("setup: ~/modules.sh\n", encoding="utf-8")
    section = "launch: {python: ~/venv/bin/python, secrets: {A: {file: ~/.a}}, slurm: {profile: ~/site.yaml}}\n"
    launch = planned(spec_text(section), tmp_path / "specs").launch
    home = str(tmp_path / "home")
    assert launch.slurm.setup == f"{home}/modules.sh"
    assert launch.python == f"{home}/venv/bin/python"
    assert launch.secrets["A"].file == f"{home}/.a"


def test_paths_begin_at_the_folder_of_the_spec(tmp_path: Path) -> None:
    section = "launch: {target: slurm, image: train.sif, slurm: {container: apptainer, setup: my/modules.sh}}\n"
    launch = planned(spec_text(section), tmp_path).launch
    assert launch.image == str(tmp_path / "train.sif")
    assert launch.slurm.setup == str(tmp_path / "my" / "modules.sh")
    registry = "launch: {target: slurm, image: 'a/train:1', slurm: {container: apptainer}}\n"
    assert planned(spec_text(registry), tmp_path).launch.image == "a/train:1"


def test_a_mistake_in_a_site_profile_is_shown_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "site.yaml").write_text("account: a\npartiton: gpu\n", encoding="utf-8")
    spec = tmp_path / "mine.yaml"
    spec.write_text(spec_text(NETWORKED, nodes=2), encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        run(["plan", str(spec)])
    assert ended.value.code == 1
    shown = capsys.readouterr().err
    assert f"{tmp_path / 'site.yaml'}:2:1" in shown
    assert "2 │ partiton: gpu" in shown
    assert "did you mean `partition`?" in shown
