"""Large blocks that a rank frees go back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import sys, torch
from partool_runtime.allocator import LARGE_BYTES, return_large_blocks

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

if sys.argv[1] == "set":
    return_large_blocks()
size = LARGE_BYTES + 4096
torch.ones(size, dtype=torch.uint8)  # glibc's own limit follows this block
before = resident()
blocks = [torch.ones(size, dtype=torch.uint8) for _ in range(4)]
kept = torch.ones(1 << 16, dtype=torch.uint8)  # above them in the heap, if they lie there
del blocks
print((resident() - before) // size)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize(("mode", "blocks"), [("set", 0), ("not set", 4)])
def test_freed_blocks_go_back(mode: str, blocks: int) -> None:
    command = [sys.executable, "-c", PROGRAM, mode]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env={"OMP_NUM_THREADS": "1"})
    assert int(ran.stdout) == blocks
