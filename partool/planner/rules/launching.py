"""The launch section with defaults resolved, its environment variables, and its checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from partool.catalog.lookup import table
from partool.catalog.network import network_environment, preset_of
from partool.diagnostics.record import Diagnostic
from partool.plan.types import Variable
from partool.planner import allocator
from partool.planner.rules.hardware import check_hardware
from partool.spec.hardware import Devices, HardwareSpec
from partool.spec.launch import LaunchSpec
from partool.spec.launch_checks import ERRORS, check_warnings, contained
from partool.spec.patterns import is_image_file
from partool.spec.spec import Spec
from partool.spec.targets.rules import rules_of
from partool.spec.targets.slurm.site_profile import Merged, from_folder, with_site_profile
from partool.spec.watched import independent
from partool.strategies.targets import RESIZABLE, SCHEDULERS, TARGETS

_LL128_SETTLED = ("NCCL_PROTO", "NCCL_LL128_C2C", "FI_CXI_RDZV_GET_MIN")


@dataclass(frozen=True)
class ResolvedLaunch:
    """A launch section with the site profile merged in and absolute paths."""

    launch: LaunchSpec
    site: Merged

    def check(self, devices: Devices) -> list[Diagnostic]:
        """Return findings about launching a plan; findings about values from the site profile point to the profile."""
        return [*self.site.findings, *map(self.site.placed, check_launch(self.launch, devices, planning=True))]


def trains_here(spec: Spec) -> bool:
    """Return True if the ranks run on the planning machine; they then lack every file that this machine lacks."""
    return spec.hardware.accelerator in ("auto", "cpu") and spec.launch.target not in SCHEDULERS


def resolve_launch(launch: LaunchSpec, base_dir: Path) -> ResolvedLaunch:
    """Return the section with the site profile merged in and absolute paths.

    Relative paths start from ``base_dir``, the spec's folder.
    """
    site = with_site_profile(launch.slurm, base_dir)
    slurm = site.slurm.model_copy(update={"setup": _absolute(site.slurm.setup, base_dir)})
    secrets, python, image = launch.secrets, launch.python, launch.image
    if not contained(launch):  # in a container, only absolute paths mean anything
        secrets = {
            name: secret.model_copy(update={"file": _absolute(secret.file, base_dir)})
            for name, secret in secrets.items()
        }
        python = _absolute(python, base_dir) if python is not None and python.startswith("~") else python
    if image is not None and is_image_file(image):
        image = _absolute(image, base_dir)
    update = {"slurm": slurm, "secrets": secrets, "python": python, "image": image}
    return ResolvedLaunch(launch.model_copy(update=update), site)


def _absolute(path: str | None, base_dir: Path) -> str | None:
    return None if path is None else str(from_folder(path, base_dir))


def environment(launch: LaunchSpec, devices: Devices) -> tuple[Variable, ...]:
    """Return the environment variables that the plan sets on every rank, sorted by name; ``launch.env`` has priority.

    Secrets, which ``launch.secrets`` names, are not included.
    """
    variables: dict[str, Variable] = {}
    if devices.threads_per_rank:
        text = "partool: the ranks share the node's cores"
        variables["OMP_NUM_THREADS"] = Variable(
            name="OMP_NUM_THREADS", value=str(devices.threads_per_rank), origin=text
        )
    if (setting := allocator.variable(launch, devices)) is not None:
        variables[setting.name] = setting
    for row in network_environment(launch.network, devices):
        origin = f"network preset {row.preset} ({row.source}, {row.as_of}): {row.why}"
        variables[row.name] = Variable(name=row.name, value=row.value, origin=origin)
    for name, value in launch.env.items():
        variables[name] = Variable(name=name, value=value, origin="launch.env")
    for name in launch.secrets:
        variables.pop(name, None)
    return tuple(variables[name] for name in sorted(variables))


def within_cores(launch: LaunchSpec, hardware: HardwareSpec, devices: Devices) -> Devices:
    """Return the machines with at most as many threads per rank on a CPU as the launch section gives it cores.

    Where the ranks get fewer cores than are priced, the rates that follow from cores are lowered; figures that the spec
    states stay.
    """
    cores = rules_of(launch.target).cores(launch, devices)
    threads = devices.threads_per_rank
    if cores is None or not threads or cores >= threads * devices.per_node:
        return devices
    share = cores / (threads * devices.per_node)
    update: dict[str, float] = {"threads_per_rank": max(1, int(cores / devices.per_node))}
    if hardware.achievable_tflops is None and hardware.peak_tflops is None:
        update["achievable_flops"] = share * devices.achievable_flops
    if hardware.memory_gb_per_s is None:
        update["memory_bytes_per_s"] = share * devices.memory_bytes_per_s
    return devices.model_copy(update=update)


def check_launch(launch: LaunchSpec, devices: Devices, *, planning: bool = False) -> list[Diagnostic]:
    """Return errors and warnings about launching on these machines with the target of ``launch``.

    With ``planning``, a default target that does not fit the machines is allowed, as a plan may be for other machines.
    """
    findings = [finding for rule in ERRORS for finding in independent(rule, launch)]
    findings += independent(check_warnings, launch)
    if not planning or "target" in launch.model_fields_set:
        findings += independent(_several_nodes, launch, devices)
    of_target = rules_of(launch.target).on_machines
    for rule in (_restarts, _requeues, _fewer, _machines, _network, of_target, check_hardware):
        findings += independent(rule, launch, devices)
    return findings


def _several_nodes(launch: LaunchSpec, devices: Devices) -> Iterator[Diagnostic]:
    if TARGETS[launch.target].starter == "here" and devices.nodes > 1:
        message = f"the target {launch.target} starts the ranks of one machine, and the plan has {devices.nodes} nodes"
        by_hand = " or ".join(name for name, record in TARGETS.items() if record.starter == "by hand")
        help = (
            f"use the target {' or '.join(SCHEDULERS)}; {by_hand} renders one command per node; or set hardware.nodes=1"
        )
        yield Diagnostic("PT524", message, path=("launch", "target"), help=help)


def _restarts(launch: LaunchSpec, devices: Devices) -> Iterator[Diagnostic]:
    if TARGETS[launch.target].starter == "by hand" and devices.nodes > 1 and launch.restarts:
        message = f"restarts: {launch.restarts} needs a scheduler that restarts all {devices.nodes} nodes together"
        help = f"set restarts: 0, or use the target {' or '.join(SCHEDULERS)}, whose schedulers do"
        yield Diagnostic("PT524", message, path=("launch", "restarts"), help=help)


def _requeues(launch: LaunchSpec, devices: Devices) -> Iterator[Diagnostic]:
    """Yield a finding if ``requeues`` is set although it has no effect with the launch target."""
    comes_back = TARGETS[launch.target].comes_back
    if comes_back and launch.requeues != LaunchSpec().requeues:
        message = (
            f"requeues: {launch.requeues} has no effect: with the target {launch.target} a run comes back {comes_back}"
        )
        counting = " or ".join(name for name, record in TARGETS.items() if not record.comes_back)
        help = f"drop it, or leave it for when the spec goes to {counting}"
        yield Diagnostic("PT524", message, severity="note", path=("launch", "requeues"), help=help)


def _fewer(launch: LaunchSpec, devices: Devices) -> Iterator[Diagnostic]:
    if launch.target in RESIZABLE and launch.min_nodes is not None and launch.min_nodes > devices.nodes:
        message = f"min_nodes: {launch.min_nodes} is more than the plan's {devices.nodes}"
        help = f"use {max(1, devices.nodes - 1)} or fewer, or drop it"
        yield Diagnostic("PT524", message, path=("launch", "min_nodes"), help=help)


def _machines(launch: LaunchSpec, devices: Devices) -> Iterator[Diagnostic]:
    """Yield a warning if the spec asks for more devices per node than a node has, as the job would not start."""
    entry = table("accelerators").get(devices.accelerator)
    if launch.target in SCHEDULERS and entry is not None and devices.per_node > entry["per_node"]:
        usual, total = entry["per_node"], devices.nodes * devices.per_node
        message = f"{devices.per_node} devices per node are asked for; nodes with {devices.accelerator} have {usual}"
        nodes = -(-total // usual)
        help = f"for {total} devices write nodes: {nodes}, per_node: {usual}"
        yield Diagnostic("PT524", message, severity="warning", path=("hardware", "per_node"), help=help)


def _network(launch: LaunchSpec, devices: Devices) -> Iterator[Diagnostic]:
    path = ("launch", "network")
    if devices.backend == "cpu" and launch.network not in ("none", "auto"):
        message = f"network: {launch.network} sets variables of NCCL; ranks on a CPU talk through gloo, which has none"
        yield Diagnostic("PT522", message, severity="warning", path=path, help="use auto or none")
    ordered = preset_of(devices.fabric) == "slingshot" and devices.accelerator.startswith("gh200")
    set_by = {row.name for row in network_environment(launch.network, devices)} | set(launch.env)
    if ordered and devices.nodes > 1 and not set_by & set(_LL128_SETTLED):
        message = "on GH200 with Slingshot, NCCL's LL128 protocol has corrupted data in silence (NVIDIA/nccl #2001)"
        help = "set network: auto, which sets HPE's remedy, or NCCL_LL128_C2C: '0' in launch.env"
        yield Diagnostic("PT522", message, severity="warning", path=path, help=help)
