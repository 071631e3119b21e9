"""Chooses the cores and memory of each rank of this node, and binds the rank to them.

The agent decides, from sysfs, and passes the choice through the rank's environment; the rank applies the choice
first, so that later threads and pages follow it. No error here is fatal: a rank that cannot be bound runs unbound.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from partool_runtime.agent.local_devices import Device, UnknownDevicesError, local_devices

CPUS, MEMORY_NODE, MEMORY_POLICY = "PARTOOL_CPUS", "PARTOOL_MEMORY_NODE", "PARTOOL_MEMORY_POLICY"
"""Environment variables of a rank: a list of cores such as ``0-15,64-79``; a memory node; ``bind`` or ``preferred``."""
Policy = Literal["bind", "preferred"]
_SUPERCHIPS = ("gh200", "gb200", "gb300")
"""Machines with CPU and device in one package: device memory is also a NUMA node, into which host pages would spill."""
_ENOUGH_CORES = 4
"""Cores needed per rank: its main thread, the backward pass, the network and a data reader."""
_SYSCALL = {"x86_64": 238, "aarch64": 237}
"""System call number of set_mempolicy, by machine (arch/x86/entry/syscalls/syscall_64.tbl and
include/uapi/asm-generic/unistd.h of Linux).
"""
_MODES: dict[str, int] = {"preferred": 1, "bind": 2}
"""Values of MPOL_PREFERRED and MPOL_BIND (include/uapi/linux/mempolicy.h)."""
_FORBIDDEN = (errno.EPERM, errno.ENOSYS)
"""Errors in containers whose seccomp profile requires CAP_SYS_NICE for this call, as Docker's and containerd's do."""


@dataclass(frozen=True, slots=True)
class Binding:
    """Cores and memory that a rank is bound to."""

    cores: tuple[int, ...]
    memory_node: int | None
    """NUMA node of the rank's memory; None keeps the default: pages come from the node that the rank runs on."""
    policy: Policy = "preferred"

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that pass the binding to the rank."""
        variables = {CPUS: write_list(self.cores)}
        if self.memory_node is not None:
            variables |= {MEMORY_NODE: str(self.memory_node), MEMORY_POLICY: self.policy}
        return variables


@dataclass(frozen=True, slots=True)
class Bindings:
    """Bindings of every rank of a node, in order."""

    ranks: tuple[Binding | None, ...]
    reasons: tuple[str, ...]
    """Reason per rank why the rank is not bound; empty for a bound rank, or for all if cores cannot be chosen."""

    def environment(self, local_rank: int) -> dict[str, str]:
        """Return the variables of one rank."""
        binding = self.ranks[local_rank]
        return {} if binding is None else binding.environment

    @property
    def note(self) -> str:
        """Note for the user, in one line; empty if there is nothing to note."""
        distinct = dict.fromkeys(reason for reason in self.reasons if reason)
        if not distinct:
            return ""
        count = sum(bool(reason) for reason in self.reasons)
        return f"{count} of {len(self.ranks)} ranks are not bound to cores: {'; '.join(distinct)}"


@dataclass(frozen=True, slots=True)
class _Node:
    """A NUMA node of the kernel that has cores."""

    number: int
    cores: frozenset[int]
    """Cores that this process may use."""
    memory: bool
    """True if the node has memory that this process may use."""


def bindings(
    per_node: int,
    backend: str,
    accelerator: str,
    environ: Mapping[str, str] | None = None,
    root: Path = Path("/"),
) -> Bindings:
    """Return the bindings of the ``per_node`` ranks of this node; never raises.

    ``backend`` and ``accelerator`` come from the plan; ``environ`` holds the device masks that the ranks will see;
    ``root`` is the folder that holds ``sys``, ``proc`` and ``dev``.
    """
    nodes = _nodes(root)
    superchip = accelerator.lower().startswith(_SUPERCHIPS)
    if not nodes or (len(nodes) == 1 and not superchip):
        return _unbound(per_node, "")
    if backend == "cpu":
        return _shared(per_node, [node for node in nodes if node.cores])
    try:
        devices = local_devices(backend, os.environ if environ is None else environ, root)
    except (UnknownDevicesError, OSError, ValueError) as error:
        return _unbound(per_node, str(error))
    if len(devices) < per_node:
        return _unbound(per_node, f"{len(devices)} devices can be seen here, the plan has {per_node} per node")
    places = [_place(device, nodes, root, in_order=superchip) for device in devices[:per_node]]
    return _bound(places, sum(len(node.cores) for node in nodes), "bind" if superchip else "preferred")


def _place(device: Device, nodes: Sequence[_Node], root: Path, *, in_order: bool) -> _Node | str:
    """Return the NUMA node nearest to a device, or the reason why no node can be chosen."""
    if device.node < 0:
        if not in_order or device.count % len(nodes):
            return f"the firmware does not say where device {device.bus} is"
        node = nodes[device.index * len(nodes) // device.count]
    else:
        node = _nearest(device.node, nodes, root)
    return node if node.cores else f"none of the cores of memory node {node.number}, beside {device.bus}, may be used"


def _nearest(number: int, nodes: Sequence[_Node], root: Path) -> _Node:
    """Return node ``number`` or, if it has only memory, as on a Superchip, the nearest node with cores."""
    folder = root / "sys/devices/system/node"
    online = read_list(_text(folder / "online"))
    distances = dict(zip(online, map(int, _text(folder / f"node{number}/distance").split()), strict=False))
    return min(nodes, key=lambda node: (node.number != number, distances.get(node.number, 255)))


def _bound(places: Sequence[_Node | str], cores: int, policy: Policy) -> Bindings:
    """Return the bindings of ranks; ranks at the same NUMA node share its cores."""
    ranks: list[Binding | None] = []
    reasons: list[str] = []
    for place in places:
        reason = place if isinstance(place, str) else _too_few(place, places.count(place), cores / len(places))
        reasons.append(reason)
        if reason or isinstance(place, str):
            ranks.append(None)
        else:
            ranks.append(Binding(tuple(sorted(place.cores)), place.number if place.memory else None, policy))
    return Bindings(tuple(ranks), tuple(reasons))


def _too_few(node: _Node, sharers: int, fair: float) -> str:
    """Return the reason why a NUMA node has too few cores for each of ``sharers`` ranks; empty if it has enough."""
    each = len(node.cores) / sharers
    if each >= min(_ENOUGH_CORES, fair / 2):
        return ""
    return f"{len(node.cores)} core(s) beside memory node {node.number} may be used, by {sharers} rank(s)"


def _shared(per_node: int, nodes: Sequence[_Node]) -> Bindings:
    """Return the bindings of ranks without devices; no rank is bound if ranks cannot share NUMA nodes evenly."""
    if len(nodes) < 2:
        return _unbound(per_node, "")
    sizes = [len(node.cores) for node in nodes]
    if max(per_node, len(nodes)) % min(per_node, len(nodes)) or min(sizes) < 0.75 * max(sizes):
        return _unbound(per_node, f"{per_node} ranks cannot share {len(nodes)} memory nodes evenly")
    chosen: list[Binding | None] = []
    for rank in range(per_node):
        if per_node >= len(nodes):
            node = nodes[rank * len(nodes) // per_node]
            chosen.append(Binding(tuple(sorted(node.cores)), node.number if node.memory else None))
        else:
            each = len(nodes) // per_node
            cores = frozenset().union(*(node.cores for node in nodes[rank * each : (rank + 1) * each]))
            chosen.append(Binding(tuple(sorted(cores)), None))
    return Bindings(tuple(chosen), ("",) * per_node)


def _unbound(per_node: int, reason: str) -> Bindings:
    return Bindings((None,) * per_node, (reason,) * per_node)


def _nodes(root: Path) -> list[_Node]:
    """Return the NUMA nodes that have cores; nodes of device memory and empty nodes have no cores."""
    folder, allowed = root / "sys/devices/system/node", _allowed(root)
    usable = frozenset(read_list(_status(root, "Mems_allowed_list") or _text(folder / "online")))
    with_memory = frozenset(read_list(_text(folder / "has_memory"))) & usable
    with_cores = []
    for path in sorted(folder.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        cores = frozenset(read_list(_text(path / "cpulist")))
        if cores:
            number = int(path.name[4:])
            with_cores.append(_Node(number, cores & allowed, number in with_memory))
    return with_cores


def _allowed(root: Path) -> frozenset[int]:
    """Return the cores that this process may use according to machine, control group and scheduler."""
    if root == Path("/"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(read_list(_status(root, "Cpus_allowed_list")))


def _status(root: Path, key: str) -> str:
    lines = _text(root / "proc/self/status").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{key}:")), "")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def read_list(text: str) -> list[int]:
    """Return the numbers of a list in the kernel's format (``0-3,8``); raises ValueError."""
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def write_list(numbers: Sequence[int]) -> str:
    """Return numbers in the kernel's list format, ascending."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def apply(environ: Mapping[str, str] | None = None) -> None:
    """Bind to the cores and memory that the environment names; failures are printed on standard error and ignored."""
    environ = os.environ if environ is None else environ
    cores, node, policy = environ.get(CPUS), environ.get(MEMORY_NODE), environ.get(MEMORY_POLICY, "preferred")
    try:
        if cores:
            os.sched_setaffinity(0, read_list(cores))
    except (OSError, ValueError) as error:
        print(f"partool: warning: this rank stays on any core, not on {cores}: {error}", file=sys.stderr)
    try:
        if node:
            _set_memory_policy(int(node), policy)
    except (OSError, ValueError, KeyError) as error:
        if policy == "preferred" and getattr(error, "errno", 0) in _FORBIDDEN:
            return  # by default pages come from the node where a thread runs, which is nearly the same
        print(f"partool: warning: this rank's memory may come from any node, not from {node}: {error}", file=sys.stderr)


def _set_memory_policy(node: int, policy: str) -> None:
    """Call set_mempolicy(2) for this thread and later threads; raises OSError, or KeyError for an unknown machine."""
    number = _SYSCALL[platform.machine()]
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    words = node // bits + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // bits] = 1 << node % bits
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    # The kernel subtracts one from the number of bits before it reads them.
    size = ctypes.c_ulong(words * bits + 1)
    if libc.syscall(ctypes.c_long(number), ctypes.c_long(_MODES[policy]), mask, size) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
