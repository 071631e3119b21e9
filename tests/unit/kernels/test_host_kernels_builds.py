"""The C++ sources in builds that are not installed: for another processor, and with the thread sanitizer."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from partool_kernels import _native

ROOT = Path(__file__).resolve().parents[3]
CPU = ROOT / "kernels" / "partool_kernels" / "cpu"
DRIVER = Path(__file__).parents[1] / "host_kernels" / "driver.cpp"
REST = [str(CPU / name) for name in ("dispatch.cpp", "passes.cpp", "pool.cpp")] + [str(DRIVER)]
FLAGS = ["-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread", f"-I{CPU}"]
"""Compiler flags, as in CMakeLists.txt."""
HASH = "608ede7b06127b8f"
"""Hash of the driver's results, the same on every processor; a change of the arithmetic must update it."""


def _needs(*tools: str) -> None:
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"there is no {' and no '.join(missing)}")


def _run(*commands: Sequence[str]) -> str:
    """Run commands side by side; return what they print."""
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    said = [process.communicate(timeout=200)[0] for process in running]
    for process, command, text in zip(running, commands, said, strict=True):
        assert process.returncode == 0, f"{' '.join(command)}\n{text}"
    return "".join(said)


def _objects(compiler: str, tmp_path: Path, builds: dict[str, list[str]]) -> list[str]:
    """Compile the kernels once per instruction set."""
    paths = {name: str(tmp_path / f"{name}.o") for name in builds}
    source = str(CPU / "kernels.cpp")
    _run(
        *(
            [compiler, *FLAGS, *more, f"-DPARTOOL_ISA={name}", "-c", source, "-o", paths[name]]
            for name, more in builds.items()
        )
    )
    return list(paths.values())


@pytest.mark.skipif(_native.library() is None, reason="no compiled library")
def test_bits_on_this_machine(tmp_path: Path) -> None:
    _needs("g++")
    library, program = str(_native.library_path()), str(tmp_path / "driver")
    _run(["g++", *FLAGS, "-O1", str(DRIVER), library, f"-Wl,-rpath,{Path(library).parent}", "-o", program])
    assert _run([program, "2"]) == "".join(f"{name} {HASH}\n" for name in _native.isas())


def test_bits_on_aarch64(tmp_path: Path) -> None:
    """NEON, and SVE2 with vectors of 512 bits, in an emulator."""
    _needs("aarch64-linux-gnu-g++", "qemu-aarch64-static")
    compiler, program = "aarch64-linux-gnu-g++", str(tmp_path / "driver")
    objects = _objects(compiler, tmp_path, {"baseline": ["-O3"], "sve2": ["-O3", "-march=armv8.2-a+sve2"]})
    _run([compiler, *FLAGS, "-O1", "-DPARTOOL_SVE2", "-static", *REST, *objects, "-o", program])
    said = _run(["qemu-aarch64-static", "-cpu", "max,sve512=on", program, "2"])
    assert said == f"sve2 {HASH}\nbaseline {HASH}\n"


def test_thread_sanitizer_is_clean(tmp_path: Path) -> None:
    _needs("g++", "setarch")
    program = str(tmp_path / "driver")
    flags = [*FLAGS, "-O1", "-g1", "-fsanitize=thread"]
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() {}\n", encoding="utf-8")
    if subprocess.run(["g++", *flags, str(probe), "-o", program], capture_output=True, check=False).returncode:
        pytest.skip("g++ has no thread sanitizer")
    objects = _objects("g++", tmp_path, {"baseline": ["-O1", "-g1", "-fsanitize=thread"]})
    _run(["g++", *flags, *REST, *objects, "-o", program])
    # The sanitizer's shadow memory has no room where addresses are very random.
    assert _run(["setarch", "-R", program, "3"]) == f"baseline {HASH}\n"
