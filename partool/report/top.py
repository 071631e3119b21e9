"""A live view of a run, made from the event logs of the run's ranks."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from partool.plan.event_log import EVENTS, Event, read_new_events
from partool.report.units import figure

_ROWS = 10


class RunView:
    """Follows the event logs of a run's ranks; :meth:`read` reads new events, :meth:`render` draws the state."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self._folder = run_dir / EVENTS
        self._name = name
        self._offsets: dict[Path, int] = {}
        self._steps: deque[dict[str, Any]] = deque(maxlen=_ROWS)
        self._ranks: dict[int, dict[str, Any]] = {}
        self._notes: dict[str, str] = {}

    def read(self) -> None:
        """Read the events that were added to each rank's log since the last call."""
        for path in sorted(self._folder.glob("rank-*.jsonl")):
            events, self._offsets[path] = read_new_events(path, self._offsets.get(path, 0))
            for event in events:
                self._take(event)

    def render(self, state: str, age: str = "") -> RenderableType:
        """Return a view of the latest logged steps, the last validation and checkpoint, and each rank's latest step.

        ``age`` says how long ago the last step was.
        """
        head = f"  {state}" + (f", {age}" if age else "")
        parts: list[RenderableType] = [Text.assemble((self._name, "bold"), head)]
        parts += [Text(note) for note in self._notes.values()]
        if self._steps:
            parts.append(self._step_table())
        if len(self._ranks) > 1:
            parts.append(self._rank_table())
        return Group(*parts)

    def _take(self, event: Event) -> None:
        data, kind = event["data"], event["kind"]
        if kind == "step":
            if "memory_bytes" in data or event["rank"] not in self._ranks:
                self._ranks[event["rank"]] = data
            if event["rank"] == 0 and "memory_bytes" in data:
                self._steps.append(data)
        elif event["rank"] != 0:
            return
        elif kind == "start":
            self._notes.clear()
            after = f", resumed after step {data['resumed_from']}" if data.get("resumed_from") else ""
            self._notes["start"] = f"attempt {data.get('attempt')}, {data.get('world_size')} ranks{after}"
        elif kind == "validation":
            of_sets = "".join(
                f", {name} {figure(each.get('loss'), '.4f')}" for name, each in (data.get("sets") or {}).items()
            )
            loss = figure(data.get("loss"), ".4f")
            self._notes["validation"] = f"validation loss {loss} at step {data['step']}{of_sets}"
        elif kind == "checkpoint":
            self._notes["checkpoint"] = f"checkpoint at step {data['step']}"
        elif kind == "end":
            self._notes["end"] = f"ended with exit code {data['exit_code']}: {data['reason']}"

    def _step_table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for heading in ("step", "loss", "grad norm", "lr", "tokens/s", "step s", "GiB", "MFU"):
            table.add_column(heading, justify="right", no_wrap=True, header_style="dim")
        for data in self._steps:
            memory, formats = data["memory_bytes"], (".4f", ".3f", ".2e", ",.0f", ".3f")
            keys = ("loss", "grad_norm", "lr", "tokens_per_s", "step_time_s")
            figures = [figure(data.get(key), form) for key, form in zip(keys, formats, strict=True)]
            gib = figure(None if memory is None else memory / 2**30, ".2f")
            table.add_row(str(data["step"]), *figures, gib, figure(data.get("mfu"), ".1%"))
        return table

    def _rank_table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for heading in ("rank", "step", "step s", "GiB"):
            table.add_column(heading, justify="right", no_wrap=True, header_style="dim")
        for rank, data in sorted(self._ranks.items()):
            memory = data.get("memory_bytes")
            gib = figure(None if memory is None else memory / 2**30, ".2f")
            table.add_row(str(rank), str(data["step"]), figure(data.get("step_time_s"), ".3f"), gib)
        return table
