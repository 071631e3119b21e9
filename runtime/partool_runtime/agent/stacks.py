"""What the ranks of a node are doing: the kernel's view of their threads, and the Python stacks that they write."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from partool.plan.run import ERRORS
from partool_runtime.agent.pulses import Pulses
from partool_runtime.agent.watchdog import STOPPED
from partool_runtime.pulse import STACK_SIGNAL

_ANSWER_S = 10.0
"""Seconds for the ranks to write their stacks; the agent does nothing else meanwhile."""
_SETTLED_S = 0.2
"""Seconds without further text after which stacks are complete."""
_THREADS_SHOWN = 200


def stacks_folder(run_dir: Path, attempt: int) -> Path:
    """Return the folder of the stacks of a stalled attempt."""
    return run_dir / ERRORS / f"attempt-{attempt}"


def process_state(pid: int) -> str:
    """Return the state of a process in proc(5), such as ``S`` or ``T``; empty where it cannot be read."""
    return _state(Path(f"/proc/{pid}"))


def write_stacks(run_dir: Path, attempt: int, pids: Mapping[int, int], pulses: Pulses) -> Path:
    """Write ``errors/attempt-N/rank-K.stacks.txt`` for each rank, and return the folder.

    ``pids`` maps ranks to their processes. The kernel's view is read first. Then each rank is asked for its Python
    stacks; a stopped process is continued for that, as it could not answer otherwise, so the caller must kill the ranks
    afterwards. A full disk loses the files, and nothing else.
    """
    views = {rank: _view(pid) for rank, pid in pids.items()}
    for pid in pids.values():
        with suppress(ProcessLookupError):
            os.kill(pid, STACK_SIGNAL)
            if process_state(pid) == STOPPED:
                os.kill(pid, signal.SIGCONT)
    stacks = _answers(pids, pulses)
    folder = stacks_folder(run_dir, attempt)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for rank, view in views.items():
            text = f"{view}\n\nPython stacks:\n{stacks[rank] or _NO_ANSWER}"
            (folder / f"rank-{rank}.stacks.txt").write_text(text, encoding="utf-8")
    return folder


_NO_ANSWER = f"none: the process did not answer within {_ANSWER_S:g} s\n"


def _answers(pids: Mapping[int, int], pulses: Pulses) -> dict[int, str]:
    """Return the ranks' stacks, once all are complete or after the time limit."""
    end = time.monotonic() + _ANSWER_S
    stacks = dict.fromkeys(pids, "")
    changed_at = time.monotonic()
    while (now := time.monotonic()) < end:
        read = {rank: pulses.stack(rank) for rank in pids}
        if read != stacks:
            stacks, changed_at = read, now
        if all(stacks.values()) and now - changed_at >= _SETTLED_S:
            break
        time.sleep(0.05)
    return stacks


def _view(pid: int) -> str:
    """Return the kernel's view of a process: its state, and for each thread its state and what it waits for."""
    folder = Path(f"/proc/{pid}")
    lines = [f"process {pid}: state {_state(folder) or 'unknown'}"]
    if _state(folder) == STOPPED:
        lines[0] += f" (stopped by a signal; it was continued with {signal.SIGCONT.name} to get its stacks)"
    try:
        threads = sorted((folder / "task").iterdir(), key=lambda task: int(task.name))
    except OSError:
        return "\n".join([*lines, "its threads cannot be read"])
    lines += [_thread(task) for task in threads[:_THREADS_SHOWN]]
    if len(threads) > _THREADS_SHOWN:
        lines.append(f"  and {len(threads) - _THREADS_SHOWN} more threads")
    return "\n".join(lines)


def _thread(task: Path) -> str:
    """Return one line about a thread, and the kernel's stack of it if this user may read that."""
    wait = _text(task / "wchan")
    line = f"  thread {task.name} ({_text(task / 'comm')}): state {_state(task) or 'unknown'}"
    line += f", waits in {wait}" if wait not in ("", "0") else ""
    kernel = _text(task / "stack")
    return line + "".join(f"\n    {frame}" for frame in kernel.splitlines())


def _state(folder: Path) -> str:
    fields = _text(folder / "stat").rpartition(")")[2].split()  # the name before it may hold blanks and brackets
    return fields[0] if fields else ""


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
