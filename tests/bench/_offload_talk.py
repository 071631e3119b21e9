"""Starts the sides of a benchmark of offload, lets them make steps in turn, and ends them."""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from _offload_job import OFFLOADS, Job, SideName, Steps, make_plan, read_plan, shape_settings

MOST_APART = 5e-2
"""Largest relative difference of losses and norms in bf16 after a few steps."""


class SideError(RuntimeError):
    """A side ended, or did not answer in time; the message holds its last output."""


@dataclass
class Talk:
    """A side's process."""

    side: SideName
    process: subprocess.Popen[bytes]
    log: Path
    until_s: float
    """Deadline, by the monotonic clock."""
    _read: bytes = field(default=b"", repr=False)

    def ask(self, what: str, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        self.send(what, **request)
        return self.answer()

    def send(self, what: str, **request: Any) -> None:
        """Send a request."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": what, **request}).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise self._failed("has ended") from None

    def answer(self) -> dict[str, Any]:
        """Wait for the next answer."""
        assert self.process.stdout is not None
        while b"\n" not in self._read:
            left_s = self.until_s - time.monotonic()
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, left_s))
            if not ready:
                raise self._failed("took too long")
            if not (data := os.read(self.process.stdout.fileno(), 65536)):
                raise self._failed("has ended")
            self._read += data
        line, self._read = self._read.split(b"\n", 1)
        return cast("dict[str, Any]", json.loads(line))

    def _failed(self, how: str) -> SideError:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return SideError(f"{self.side} {how}: " + "\n".join(lines[-6:]))


@dataclass(frozen=True)
class Bench:
    """Folders, settings and time limit of a benchmark."""

    folder: Path
    device: Mapping[str, object]
    """Plan settings that select the hardware."""
    deepspeed: str
    """Folder with DeepSpeed's packages; empty: DeepSpeed is left out."""
    built: str
    """Folder for DeepSpeed's compiled optimizer."""
    until_s: float
    """Deadline, by the monotonic clock."""

    def plan(self, name: str, side: SideName, size: str, settings: Mapping[str, object]) -> Path:
        """Plan one side of a comparison."""
        every = {**self.device, **OFFLOADS[side], **settings}
        return make_plan(self.folder / name / side, size, every)

    @contextmanager
    def talk(self, plan: Path, side: SideName) -> Iterator[Talk]:
        """Start a side's process, which is terminated on exit; its first answer comes when it is ready."""
        job = plan.parent / "job.json"
        Job(side, plan.read_text(encoding="utf-8"), self.deepspeed, self.built).write(job)
        log = plan.parent / "side.log"
        command = [sys.executable, str(Path(__file__).with_name("_offload_side.py")), str(job)]
        with log.open("wb") as errors:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
        try:
            yield Talk(side, process, log, self.until_s)
        finally:
            process.kill()
            process.communicate()


def compare_bits(bench: Bench, size: str, rounds: Sequence[Steps], *also: SideName) -> dict[str, Any]:
    """Run the same steps with offload, by the reference, and ``also`` by ``waiting`` or ``device``.

    Exits if any bit of the state differs, or if losses with the optimizer on the device are far from the others.
    """
    sides: tuple[SideName, ...] = ("offloaded", "reference", *also)
    found, digests = {}, {}
    for side in sides:
        settings = shape_settings(rounds[0]) | {"training.deterministic": "true", "optimizer.lr": 1e-3}
        with bench.talk(bench.plan("check", side, size, settings), side) as talk:
            talk.answer()
            made = [talk.ask("steps", **asdict(steps)) for steps in rounds]
            found[side] = [value for each in made for value in (*each["losses"], *each["norms"])]
            digests[side] = talk.ask("digests")
            figures = talk.ask("usage")["figures"]
        if side == "offloaded" and not figures.get("rejected"):
            raise SystemExit(f"no step was rejected, so nothing is shown: {figures}")
    exact = [side for side in sides if side in ("offloaded", "waiting")]
    for side in exact:
        names = {name for name in digests["reference"] if digests["reference"][name] != digests[side].get(name)}
        if names or found[side] != found["reference"]:
            raise SystemExit(f"{side} is not the reference to the bit: {sorted(names)[:5]}, {found}")
    checked: dict[str, Any] = {"bitwise": exact, "tensors": len(digests["reference"])}
    if "device" in found:
        checked["device_apart"] = max(
            abs(a - b) / abs(b) for a, b in zip(found["device"], found["reference"], strict=True)
        )
        if not checked["device_apart"] < MOST_APART:
            raise SystemExit(f"the optimizer on the device gives other losses and norms: {found}")
    return checked


def in_turn(
    bench: Bench, name: str, size: str, sides: Sequence[SideName], shapes: Mapping[str, Steps], rounds: int
) -> dict[str, Any]:
    """Let sides that run at the same time make steps in turn; return the seconds of a step, per shape and side.

    A side that runs out of memory or time is left out from then on, and its message is kept.
    """
    largest = max(shapes.values(), key=lambda steps: steps.sequences * steps.tokens)
    record: dict[str, Any] = {"seconds": {}, "figures": {}, "losses": {}, "failed": {}, "usage": {}, "ready_s": {}}
    with ExitStack() as stack:
        talks = {}
        for side in sides:
            with _kept(record, side):
                plan = bench.plan(name, side, size, shape_settings(largest))
                talks[side] = stack.enter_context(bench.talk(plan, side))
                record.setdefault("predicted", {})[side] = _predicted(plan)
        for side in list(talks):
            with _kept(record, side):
                record["ready_s"][side] = talks[side].answer()["ready_s"]
        first = 0
        for turn in range(rounds + 1):  # the first one warms up
            for shape, steps in shapes.items():
                _round(record, talks, shape, replace(steps, first=first), turn)
                first += steps.count
        for side, talk in talks.items():
            if side not in record["failed"]:
                with _kept(record, side):
                    record["usage"][side] = talk.ask("usage")
    record["step_s"] = {
        shape: {side: statistics.median(times) for side, times in found.items()}
        for shape, found in record["seconds"].items()
    }
    return record


def _round(record: dict[str, Any], talks: Mapping[SideName, Talk], shape: str, steps: Steps, turn: int) -> None:
    order = list(talks) if turn % 2 == 0 else list(reversed(talks))
    for side in order:
        if side in record["failed"]:
            continue
        with _kept(record, side):
            answer = talks[side].ask("steps", **asdict(steps))
            record["losses"].setdefault(shape, {})[side] = answer["losses"]
            if not turn:
                continue
            times = record["seconds"].setdefault(shape, {}).setdefault(side, [])
            times.append(answer["seconds"] / steps.count)
            counted = record["figures"].setdefault(shape, {}).setdefault(side, {"steps": 0})
            for name, value in ({"steps": steps.count} | answer["figures"]).items():
                counted[name] = counted.get(name, 0) + value


@contextmanager
def _kept(record: dict[str, Any], side: SideName) -> Iterator[None]:
    """Record the failure of a side."""
    try:
        yield
    except RuntimeError as error:
        record["failed"][side] = str(error)
        print(f"{side} is left out: {error}", file=sys.stderr, flush=True)


def _predicted(path: Path) -> dict[str, Any]:
    plan = read_plan(path)
    memory, times = plan.prediction.memory, plan.prediction.time
    return {
        "memory_bytes": dict(memory.terms_bytes),
        "host_bytes": dict(memory.host_terms_bytes),
        "step_s": times.step_time_s,
        "breakdown_s": dict(times.breakdown_s),
    }
