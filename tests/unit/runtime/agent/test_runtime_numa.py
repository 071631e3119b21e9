"""Ranks stay near their devices: on copies of such machines' sysfs trees, and on this machine."""

from __future__ import annotations

import errno
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from partool_runtime.agent import numa
from partool_runtime.agent.numa import bindings, read_list, write_list


class Tree:
    """Sysfs files of a machine; nodes are given as ``{number: list of cores}``, empty if a node has none."""

    def __init__(self, root: Path, nodes: dict[int, str], memory: str, allowed: str = "") -> None:
        self.root = root
        self.online = write_list(list(nodes))
        for number, cores in nodes.items():
            self.write(f"sys/devices/system/node/node{number}/cpulist", cores)
        self.write("sys/devices/system/node/online", self.online)
        self.write("sys/devices/system/node/has_memory", memory)
        everything = allowed or ",".join(filter(None, nodes.values()))
        self.write("proc/self/status", f"Name:\tpython\nCpus_allowed_list:\t{everything}\nMems_allowed_list:\t0-255\n")

    def write(self, name: str, text: str) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def pci(self, bus: str, node: int, vendor: str, kind: str, device: str = "0x2330") -> None:
        for name, value in {"vendor": vendor, "class": kind, "device": device, "numa_node": str(node)}.items():
            self.write(f"sys/bus/pci/devices/{bus}/{name}", value)

    def nvidia(self, places: dict[str, int], *, minors: list[int] | None = None, told: bool = True) -> None:
        for index, (bus, node) in enumerate(places.items()):
            self.pci(bus, node, "0x10de", "0x030200")
            minor = minors[index] if minors else index
            if told:
                text = f"Model: \t\t NVIDIA\nGPU UUID: \t GPU-{index:08x}-aaaa\nDevice Minor: \t {minor}"
                self.write(f"proc/driver/nvidia/gpus/{bus}/information", text)
            self.write(f"dev/nvidia{minor}", "")

    def amd(self, places: dict[str, int], *, parts: int = 1) -> None:
        number = 2
        self.write("sys/class/kfd/kfd/topology/nodes/0/properties", "cpu_cores_count 96\nsimd_count 0")
        for index, (bus, node) in enumerate(places.items()):
            self.pci(bus, node, "0x1002", "0x120000", "0x74a1")
            self.write(f"sys/bus/pci/devices/{bus}/unique_id", f"{index:016x}")
            domain, slot = bus.split(":", 1)[0], int(bus.split(":")[1], 16) << 8
            for part in range(parts):
                minor = 128 + index * parts + part
                text = f"simd_count 1216\nlocation_id {slot + part}\ndomain {int(domain, 16)}\ndrm_render_minor {minor}"
                self.write(f"sys/class/kfd/kfd/topology/nodes/{number}/properties", text)
                self.write(f"dev/dri/renderD{minor}", "")
                number += 1


HOPPER = {
    "0000:1b:00.0": 0, "0000:43:00.0": 0, "0000:52:00.0": 0, "0000:61:00.0": 0,
    "0000:9d:00.0": 1, "0000:c3:00.0": 1, "0000:d1:00.0": 1, "0000:df:00.0": 1,
}  # fmt: skip
SOCKETS = {0: "0-55,112-167", 1: "56-111,168-223"}


@pytest.fixture
def hopper(tmp_path: Path) -> Tree:
    tree = Tree(tmp_path, SOCKETS, "0-1")
    tree.nvidia(HOPPER)
    tree.pci("0000:00:02.0", 0, "0x1a03", "0x030000")  # the board's own screen
    tree.pci("0000:1c:00.0", 0, "0x10de", "0x068000")  # an NVIDIA switch, not a device
    return tree


def where(found: numa.Bindings) -> list[int | None]:
    return [None if binding is None else binding.memory_node for binding in found.ranks]


def test_two_sockets_of_four_devices(hopper: Tree) -> None:
    found = bindings(8, "cuda", "h100-sxm", {}, hopper.root)
    assert where(found) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert found.environment(0) == {
        "PARTOOL_CPUS": "0-55,112-167",
        "PARTOOL_MEMORY_NODE": "0",
        "PARTOOL_MEMORY_POLICY": "preferred",
    }
    assert found.environment(7)["PARTOOL_CPUS"] == "56-111,168-223"
    assert found.note == ""


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("4,0", [1, 0]),
        (" 7 , 6 ", [1, 1]),
        ("GPU-00000004-aaaa,GPU-00000003-aaaa", [1, 0]),
        ("GPU-00000005,0", [1, 0]),
        ("3,4,-1,0", [0, 1]),
    ],
)
def test_device_masks_renumber(hopper: Tree, mask: str, expected: list[int]) -> None:
    assert where(bindings(2, "cuda", "h100-sxm", {"CUDA_VISIBLE_DEVICES": mask}, hopper.root)) == expected


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        ("MIG-5c89852c-d268-c3f3-1b07-005d5ae1dc3f,0", "part of a device"),
        ("GPU-0000000", "not among the devices"),
        ("GPU-ffffffff", "not among the devices"),
        ("2", "1 devices can be seen here, the plan has 2"),
        ("", "0 devices"),
        ("-1,2,3", "0 devices"),
        ("0,99,1", "1 devices"),
    ],
)
def test_masks_that_cannot_be_followed_bind_nothing_and_say_so(hopper: Tree, mask: str, reason: str) -> None:
    found = bindings(2, "cuda", "h100-sxm", {"CUDA_VISIBLE_DEVICES": mask}, hopper.root)
    assert where(found) == [None, None]
    assert found.environment(0) == {}
    assert reason in found.note
    assert "2 of 2 ranks" in found.note


def test_a_job_that_may_open_some_devices_counts_those(hopper: Tree) -> None:
    # under a scheduler that constrains devices, or in a container: all devices in sysfs, some under /dev
    for minor in (0, 1, 2, 3):
        (hopper.root / f"dev/nvidia{minor}").unlink()
    found = bindings(2, "cuda", "h100-sxm", {"CUDA_VISIBLE_DEVICES": "0,1"}, hopper.root)
    assert where(found) == [1, 1]
    for bus in list(HOPPER)[:6]:
        (hopper.root / f"proc/driver/nvidia/gpus/{bus}/information").unlink()
    assert where(bindings(2, "cuda", "h100-sxm", {}, hopper.root)) == [1, 1]


def test_which_of_the_devices_are_ours_may_be_unknown(tmp_path: Path) -> None:
    tree = Tree(tmp_path, SOCKETS, "0-1")
    tree.nvidia(HOPPER, told=False)
    assert where(bindings(8, "cuda", "h100-sxm", {}, tmp_path)) == [0, 0, 0, 0, 1, 1, 1, 1]
    (tmp_path / "dev/nvidia5").unlink()
    found = bindings(4, "cuda", "h100-sxm", {}, tmp_path)
    assert where(found) == [None] * 4
    assert "8 devices are in this node, 7 can be opened" in found.note


def test_minor_numbers_need_not_follow_the_bus(tmp_path: Path) -> None:
    tree = Tree(tmp_path, SOCKETS, "0-1")
    tree.nvidia(HOPPER, minors=[4, 5, 6, 7, 0, 1, 2, 3])
    for minor in (4, 5, 6, 7):
        (tmp_path / f"dev/nvidia{minor}").unlink()
    assert where(bindings(4, "cuda", "h100-sxm", {}, tmp_path)) == [1, 1, 1, 1]


def test_unlike_devices_are_numbered_by_speed(hopper: Tree) -> None:
    hopper.write("sys/bus/pci/devices/0000:1b:00.0/device", "0x20b2")
    assert where(bindings(8, "cuda", "h100-sxm", {}, hopper.root)) == [None] * 8
    by_place = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert where(bindings(8, "cuda", "h100-sxm", by_place, hopper.root))[0] == 0


def superchips(root: Path, *, told: bool, reversed_places: bool = False) -> Tree:
    """Four GH200: 4 nodes with cores and memory, 4 with device memory, 28 that stay empty."""
    nodes = {number: f"{72 * number}-{72 * number + 71}" if number < 4 else "" for number in range(36)}
    tree = Tree(root, nodes, "0-4,12,20,28")
    order = [3, 2, 1, 0] if reversed_places else [0, 1, 2, 3]
    buses = ["0009:01:00.0", "0019:01:00.0", "0029:01:00.0", "0039:01:00.0"]
    tree.nvidia({bus: node if told else -1 for bus, node in zip(buses, order, strict=True)})
    return tree


def test_a_node_of_superchips_shows_36_memory_nodes(tmp_path: Path) -> None:
    tree = superchips(tmp_path, told=True)
    found = bindings(4, "cuda", "gh200-96", {}, tree.root)
    assert [binding.environment for binding in found.ranks if binding] == [
        {
            "PARTOOL_CPUS": f"{72 * rank}-{72 * rank + 71}",
            "PARTOOL_MEMORY_NODE": str(rank),
            "PARTOOL_MEMORY_POLICY": "bind",
        }
        for rank in range(4)
    ]


def test_superchips_in_the_order_that_the_firmware_says(tmp_path: Path) -> None:
    assert where(bindings(4, "cuda", "gh200-96", {}, superchips(tmp_path, told=True, reversed_places=True).root)) == [
        3, 2, 1, 0,
    ]  # fmt: skip


def test_superchips_whose_firmware_says_nothing_go_by_order_also_behind_a_mask(tmp_path: Path) -> None:
    tree = superchips(tmp_path, told=False)
    assert where(bindings(4, "cuda", "gh200-96", {}, tree.root)) == [0, 1, 2, 3]
    assert where(bindings(2, "cuda", "gh200-96", {"CUDA_VISIBLE_DEVICES": "3,1"}, tree.root)) == [3, 1]


def test_a_device_whose_place_is_its_own_memory_goes_to_the_nearest_cores(tmp_path: Path) -> None:
    tree = superchips(tmp_path, told=True)
    tree.write("sys/bus/pci/devices/0029:01:00.0/numa_node", "20")
    distances = ["40"] * 36
    distances[2], distances[20] = "80", "10"
    distances[0] = distances[1] = distances[3] = "120"
    tree.write("sys/devices/system/node/node20/distance", " ".join(distances))
    assert where(bindings(4, "cuda", "gh200-96", {}, tree.root)) == [0, 1, 2, 3]


def test_one_superchip_keeps_host_pages_out_of_device_memory(tmp_path: Path) -> None:
    tree = Tree(tmp_path, {0: "0-71", 1: ""}, "0-1")
    tree.nvidia({"0009:01:00.0": 0})
    found = bindings(1, "cuda", "gh200-96", {}, tmp_path)
    assert found.environment(0)["PARTOOL_MEMORY_POLICY"] == "bind"
    assert where(found) == [0]


def test_two_devices_to_a_chip(tmp_path: Path) -> None:
    tree = Tree(tmp_path, {0: "0-71", 1: "72-143", **dict.fromkeys(range(2, 34), "")}, "0-2,10,18,26")
    tree.nvidia(dict.fromkeys(["0008:01:00.0", "0009:01:00.0", "0018:01:00.0", "0019:01:00.0"], -1))
    assert where(bindings(4, "cuda", "gb200", {}, tmp_path)) == [0, 0, 1, 1]


AMD = {f"0000:{bus}:00.0": index // 2 for index, bus in enumerate(["0c", "22", "38", "5c", "9f", "af", "bf", "df"])}
QUARTERS = {number: f"{24 * number}-{24 * number + 23}" for number in range(4)}


def test_eight_devices_on_four_memory_nodes(tmp_path: Path) -> None:
    Tree(tmp_path, QUARTERS, "0-3").amd(AMD)
    found = bindings(8, "rocm", "mi300x", {}, tmp_path)
    assert where(found) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert found.environment(2)["PARTOOL_CPUS"] == "24-47"


@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        ({"HIP_VISIBLE_DEVICES": "6,0"}, [3, 0]),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6,7"}, [2, 2]),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6,7", "HIP_VISIBLE_DEVICES": "2,0"}, [3, 2]),
        ({"CUDA_VISIBLE_DEVICES": "7,2"}, [3, 1]),
        ({"CUDA_VISIBLE_DEVICES": "7,2", "HIP_VISIBLE_DEVICES": "0,1"}, [0, 0]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-0000000000000005,GPU-0000000000000001"}, [2, 0]),
    ],
)
def test_masks_of_rocm(tmp_path: Path, masks: dict[str, str], expected: list[int]) -> None:
    Tree(tmp_path, QUARTERS, "0-3").amd(AMD)
    assert where(bindings(2, "rocm", "mi300x", masks, tmp_path)) == expected


def test_parts_of_a_divided_device_are_devices(tmp_path: Path) -> None:
    Tree(tmp_path, {0: "0-95", 1: "96-191"}, "0-1").amd({"0000:0c:00.0": 0, "0001:9f:00.0": 1}, parts=4)
    assert where(bindings(8, "rocm", "mi300x", {}, tmp_path)) == [0] * 4 + [1] * 4


def test_without_the_driver_s_topology_the_bus_decides(tmp_path: Path) -> None:
    tree = Tree(tmp_path, QUARTERS, "0-3")
    for index, (bus, node) in enumerate(AMD.items()):
        tree.pci(bus, node, "0x1002", "0x038000")
        tree.write(f"sys/bus/pci/devices/{bus}/drm/renderD{128 + index}/dev", "")
        tree.write(f"dev/dri/renderD{128 + index}", "")
    (tmp_path / "dev/dri/renderD128").unlink()
    assert where(bindings(7, "rocm", "mi300x", {}, tmp_path)) == [0, 1, 1, 2, 2, 3, 3]


def test_only_cores_that_the_job_may_use(tmp_path: Path) -> None:
    tree = Tree(tmp_path, SOCKETS, "0-1", allowed="0-15,60-75")
    tree.nvidia(HOPPER)
    found = bindings(8, "cuda", "h100-sxm", {}, tmp_path)
    assert [found.environment(rank)["PARTOOL_CPUS"] for rank in (0, 7)] == ["0-15", "60-75"]


def test_no_core_beside_the_device_means_no_binding(tmp_path: Path) -> None:
    tree = Tree(tmp_path, SOCKETS, "0-1", allowed="0-31")
    tree.nvidia(HOPPER)
    found = bindings(8, "cuda", "h100-sxm", {}, tmp_path)
    assert where(found) == [0, 0, 0, 0, None, None, None, None]
    assert "4 of 8 ranks are not bound to cores: none of the cores of memory node 1" in found.note


def test_a_rank_is_not_crowded_onto_few_cores(tmp_path: Path) -> None:
    tree = Tree(tmp_path, SOCKETS, "0-1", allowed="0-54,56")
    tree.nvidia(HOPPER)
    found = bindings(8, "cuda", "h100-sxm", {}, tmp_path)
    assert where(found) == [0, 0, 0, 0, None, None, None, None]
    assert "1 core(s) beside memory node 1 may be used, by 4 rank(s)" in found.note


def test_many_small_memory_nodes(tmp_path: Path) -> None:
    # four NUMA nodes per socket, devices at some of them only, one node without memory
    nodes = {number: f"{6 * number}-{6 * number + 5}" for number in range(8)}
    tree = Tree(tmp_path, nodes, "0-2,4-7")
    tree.nvidia({"0000:03:00.0": 3, "0000:44:00.0": 1, "0000:84:00.0": 7, "0000:c4:00.0": 5})
    found = bindings(4, "cuda", "a100-40", {}, tmp_path)
    assert [found.environment(rank)["PARTOOL_CPUS"] for rank in range(4)] == ["18-23", "6-11", "42-47", "30-35"]
    assert where(found) == [None, 1, 7, 5]
    assert "PARTOOL_MEMORY_POLICY" not in found.environment(0)


def test_firmware_that_says_nothing(tmp_path: Path) -> None:
    tree = Tree(tmp_path, SOCKETS, "0-1")
    tree.nvidia({**HOPPER, "0000:1b:00.0": -1})
    found = bindings(8, "cuda", "h100-sxm", {}, tmp_path)
    assert where(found) == [None, 0, 0, 0, 1, 1, 1, 1]
    assert found.note == ("1 of 8 ranks are not bound to cores: the firmware does not say where device 0000:1b:00.0 is")


@pytest.mark.parametrize(
    ("ranks", "cores", "memory"),
    [
        (4, ["0-23", "24-47", "48-71", "72-95"], [0, 1, 2, 3]),
        (8, ["0-23", "0-23", "24-47"], [0, 0, 1, 1, 2, 2, 3, 3]),
        (2, ["0-47", "48-95"], [None, None]),
        (1, ["0-95"], [None]),
    ],
)
def test_ranks_on_a_cpu_share_whole_memory_nodes(
    tmp_path: Path, ranks: int, cores: list[str], memory: list[int | None]
) -> None:
    Tree(tmp_path, QUARTERS, "0-3")
    found = bindings(ranks, "cpu", "cpu", {}, tmp_path)
    assert [found.environment(rank)["PARTOOL_CPUS"] for rank in range(ranks)][: len(cores)] == cores
    assert where(found) == memory


@pytest.mark.parametrize(("ranks", "allowed"), [(3, ""), (4, "0-23,24-25,48-71,72-95")])
def test_ranks_on_a_cpu_are_left_alone_where_shares_would_differ(tmp_path: Path, ranks: int, allowed: str) -> None:
    Tree(tmp_path, QUARTERS, "0-3", allowed=allowed)
    found = bindings(ranks, "cpu", "cpu", {}, tmp_path)
    assert where(found) == [None] * ranks
    assert "cannot share 4 memory nodes evenly" in found.note


def test_one_memory_node_leaves_nothing_to_choose(tmp_path: Path) -> None:
    tree = Tree(tmp_path, {0: "0-31"}, "0")
    tree.nvidia(dict.fromkeys(HOPPER, 0))
    for backend, name in (("cpu", "cpu"), ("cuda", "a10g")):
        found = bindings(2, backend, name, {}, tmp_path)
        assert where(found) == [None, None]
        assert found.note == ""
    assert where(bindings(2, "cpu", "cpu", {}, tmp_path / "nothing")) == [None, None]


def test_this_machine_is_read_without_an_error() -> None:
    found = bindings(2, "cpu", "cpu", {})
    assert len(found.ranks) == 2
    bindings(2, "cuda", "h100-sxm", {})
    bindings(2, "rocm", "mi300x", {})


def test_lists_of_cores() -> None:
    assert read_list("0-3,8,10-11") == [0, 1, 2, 3, 8, 10, 11]
    assert read_list("") == []
    assert write_list([11, 0, 1, 2, 10, 3, 8]) == "0-3,8,10-11"


_ASK = """
import ctypes, json, os
from partool_runtime.agent.numa import apply
apply()
mode, mask = ctypes.c_int(), (ctypes.c_ulong * 16)()
ctypes.CDLL(None).syscall({get}, ctypes.byref(mode), mask, ctypes.c_ulong(1025), None, 0)
print(json.dumps([sorted(os.sched_getaffinity(0)), mode.value, mask[0]]))
"""


def asked(**told: str) -> tuple[list[int], int, int, str]:
    """Return cores, memory policy and memory nodes of a process that was bound, and its errors."""
    script = _ASK.format(get={"x86_64": 239, "aarch64": 236}[platform.machine()])
    process = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | told, capture_output=True, text=True, check=True, timeout=30
    )
    return *json.loads(process.stdout), process.stderr


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="system call numbers of other machines")
def test_a_process_goes_where_it_is_told() -> None:
    core = max(os.sched_getaffinity(0))
    told = {"PARTOOL_CPUS": str(core), "PARTOOL_MEMORY_NODE": "0", "PARTOOL_MEMORY_POLICY": "preferred"}
    assert asked(**told) == ([core], 1, 1, "")
    assert asked(**told | {"PARTOOL_MEMORY_POLICY": "bind"}) == ([core], 2, 1, "")
    everywhere = sorted(os.sched_getaffinity(0))
    assert asked()[:2] == (everywhere, 0)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="system call numbers of other machines")
def test_a_process_that_cannot_go_there_warns_and_runs() -> None:
    told = {"PARTOOL_CPUS": "100000", "PARTOOL_MEMORY_NODE": "900", "PARTOOL_MEMORY_POLICY": "bind"}
    cores, mode, _, errors = asked(**told)
    assert (cores, mode) == (sorted(os.sched_getaffinity(0)), 0)
    assert "warning: this rank stays on any core, not on 100000" in errors
    assert "warning: this rank's memory may come from any node, not from 900" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(("policy", "warned"), [("preferred", False), ("bind", True)])
def test_containers_that_forbid_a_policy_are_no_news_where_it_hardly_matters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], policy: str, warned: bool
) -> None:
    def forbidden(node: int, policy: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(numa, "_set_memory_policy", forbidden)
    numa.apply({"PARTOOL_MEMORY_NODE": "0", "PARTOOL_MEMORY_POLICY": policy})
    assert ("may come from any node" in capsys.readouterr().err) == warned
