"""Copies of a process that run jobs side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

COPIES = """\
import os, signal, sys
from pathlib import Path
from partool_runtime.dry.apart import jobs_of, run_apart

imported = os.getpid()  # once, before the copies

def run(ranks, results):
    print("rank", *ranks)
    print(imported, os.getpid(), *ranks, file=results, flush=True)
    if 1 in ranks:
        os.kill(os.getpid(), signal.SIGKILL)
    if 2 in ranks:
        raise ValueError("rank 2")
    return 0

run_apart(jobs_of((0, 1, 2, 3), [int(each) for each in sys.argv[2:]], Path(sys.argv[1])), run)
"""


def test_copies_tell_their_results_and_how_they_ended(tmp_path: Path) -> None:
    """Three jobs for four ranks: one that works, one that is killed and one that fails."""
    pipes = [os.pipe() for _ in range(3)]
    outputs = [output for _, output in pipes]
    command = [sys.executable, "-c", COPIES, str(tmp_path), *map(str, outputs)]
    with subprocess.Popen(command, pass_fds=outputs) as first:
        for output in outputs:
            os.close(output)
        found = []
        for read, _ in pipes:
            with os.fdopen(read) as answers:
                found.append(answers.read().splitlines())
    assert first.returncode == 0
    lines = [line.split() for line, _ in found]
    assert [each[2:] for each in lines] == [["0", "3"], ["1"], ["2"]]
    assert {each[0] for each in lines} == {str(first.pid)}
    assert len({str(first.pid), *(each[1] for each in lines)}) == 4, "each job has a process of its own"
    assert [json.loads(end)["exit"] for _, end in found] == [0, -9, 1]
    errors = [(tmp_path / f"errors-{at}").read_text() for at in range(3)]
    assert errors[0] == "rank 0 3\n"
    assert "ValueError: rank 2" in errors[2]
