"""Ranks in network namespaces of their own, joined by a bridge, with links of a given rate (Linux, root, iproute2).

Both ends of every link are shaped with ``tc tbf``: a rank, or a node of ranks, sends and receives at most at its rate,
both at once, as with a full-duplex network card. Outside the namespaces only the bridge is created.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType

INTERFACE = "eth0"


def unavailable() -> str | None:
    """Return why links cannot be shaped here, or None."""
    if os.geteuid() != 0:
        return "shaping links needs root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not found: install iproute2" if missing else None


class Cables:
    """A bridge and one namespace per rank, or per node of several ranks; removed again on exit."""

    def __init__(self, ranks: int, rate_mbit: float, *, per_node: int = 1) -> None:
        self.nodes, self.rate_mbit, self.per_node = ranks // per_node, rate_mbit, per_node
        self._tag = f"pt{os.getpid() % 100000}"
        self.environment = {"MASTER_ADDR": self.address(0), "GLOO_SOCKET_IFNAME": INTERFACE}

    def address(self, rank: int) -> str:
        """Return the address of a rank; ranks of a node share one address, and reach each other without a link."""
        return f"10.213.7.{rank // self.per_node + 1}"

    def inside(self, rank: int) -> list[str]:
        """Return the command prefix that runs a command in a rank's namespace."""
        return ["ip", "netns", "exec", self._space(rank // self.per_node)]

    def __enter__(self) -> Cables:
        try:
            _do(f"ip link add {self._tag}b type bridge")
            _do(f"ip link set {self._tag}b up")
            for node in range(self.nodes):
                self._lay(node)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _space(self, node: int) -> str:
        return f"{self._tag}n{node}"

    def _lay(self, node: int) -> None:
        space, here = self._space(node), f"{self._tag}v{node}"
        _do(f"ip netns add {space}")
        _do(f"ip link add {here} type veth peer name {INTERFACE} netns {space}")
        _do(f"ip link set {here} master {self._tag}b up")
        _do(f"ip -n {space} address add {self.address(node * self.per_node)}/24 dev {INTERFACE}")
        _do(f"ip -n {space} link set {INTERFACE} up")
        _do(f"ip -n {space} link set lo up")
        # The bucket holds one large segment of the virtual card and the queue some milliseconds of traffic.
        shape = f"root tbf rate {self.rate_mbit:g}mbit burst 128kb latency 100ms"
        _do(f"tc qdisc add dev {here} {shape}")
        _do(f"tc -n {space} qdisc add dev {INTERFACE} {shape}")

    def _remove(self) -> None:
        # Deleting one end of a link deletes the other one and its settings.
        for node in range(self.nodes):
            for command in (f"ip link del {self._tag}v{node}", f"ip netns del {self._space(node)}"):
                subprocess.run(command.split(), check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self._tag}b"], check=False, capture_output=True)


def sent_bytes() -> int:
    """Return the bytes sent over this namespace's link so far, headers included."""
    with open(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes", encoding="ascii") as file:
        return int(file.read())


def _do(command: str) -> None:
    done = subprocess.run(command.split(), check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
