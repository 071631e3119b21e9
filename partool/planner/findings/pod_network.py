"""Warns of pods that have the pod network only, though the plan is priced on the nodes' fast fabric."""

from __future__ import annotations

from collections.abc import Iterator

from partool.catalog.devices import fabric_figures
from partool.catalog.network import is_rdma, network_environment
from partool.diagnostics.record import Diagnostic
from partool.planner.problem import Problem
from partool.planner.search.price import Priced
from partool.spec.launch import LaunchSpec
from partool.spec.targets.rules import rules_of

_ASSUMED = ("ethernet-100g", "ethernet-25g")
"""Fabrics of the catalog that stand for pod networks: a fast and a usual adapter of a node, over TCP. What a cluster's
pod network carries is not known here; overlays (VXLAN) carry less than their adapter."""
_SLOWER = 1.05
"""Least ratio of step times that is worth a warning, where the run starts at all."""


def check_pod_network(problem: Problem, priced: Priced, launch: LaunchSpec) -> Iterator[Diagnostic]:
    """Yield a warning if the run's nodes have a fast fabric that the launch section does not give to the pods."""
    devices = problem.devices
    path = rules_of(launch.target).fabric_field(launch)
    if path is None or devices.nodes == 1 or devices.backend == "cpu" or not is_rdma(devices.fabric):
        return
    fast_s = priced.step_time_s
    each = {name: _step_s(problem, priced, name) for name in _ASSUMED}
    forced = [row for row in network_environment(launch.network, devices) if row.name == "NCCL_NET"]
    forced = [row for row in forced if row.name not in launch.env and row.preset != "tcp"]
    if max(each.values()) < _SLOWER * fast_s and not forced:
        return
    slow = ", ".join(f"{seconds:.3g} s over {name}" for name, seconds in each.items())
    message = (
        f"the pods get no adapters of {devices.fabric}, on which a step takes {fast_s:.3g} s; over a pod network it "
        f"takes about {slow} (assumed)"
    )
    if forced:
        message += (
            f"; NCCL_NET={forced[0].value}, which the preset {forced[0].preset} sets, ends such a run at its start"
        )
    help = (
        "add rdma: {resource: NAME, count: N} with a name that `kubectl describe nodes` lists, and where the site asks "
        "for it host_network: true or the Multus annotation k8s.v1.cni.cncf.io/networks; or state what the pods have: "
        f"hardware.fabric={_ASSUMED[0]} and launch.network=tcp"
    )
    yield Diagnostic("PT346", message, severity="warning", path=path, help=help)


def _step_s(problem: Problem, priced: Priced, fabric: str) -> float:
    return Priced(problem.on(**fabric_figures(fabric, problem.devices.per_node)), priced.layout).step_time_s
