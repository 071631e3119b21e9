"""Control characters in every string of a spec: none but partool's own reach the terminal."""

from __future__ import annotations

import json
import random
import sys
from functools import partial
from pathlib import Path

import pytest
from _attack import Attack

from partool.spec._pydantic import all_paths
from partool.spec._source import SpecPath

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from _terminal import obeyed, on_a_terminal

HEAD = {
    "model": {"layers": 2, "hidden": 64, "heads": 4, "vocab": 256},
    "hardware": {"accelerator": "cpu", "per_node": 1},
    "data": "python-stdlib",
    "training": {"steps": 10},
}
PATHS: list[SpecPath] = sorted(all_paths(), key=str)
FREE: list[SpecPath] = [
    ("launch", "env", "A"),
    ("launch", "k8s", "annotations", "example.com/x"),
    ("launch", "secrets", "A", "file"),
    ("data", "source"),
    ("model", "config"),
    ("launch", "slurm", "profile"),
    ("kernels", "tuned"),
]
"""Fields that take text of any form, or of nearly any."""
BLINK = "\x1b[5;38;5;199m"
"""A colour that partool never uses."""
FIXED = [
    BLINK, "\x1b[2J\x1b[H", "\x1b]0;owned\x07", "\x1b]8;;http://example.com\x1b\\", "\x1bP+q544e\x1b\\",
    "\x1b[6n", "\x1bc", "\x9b31m", "\x9d0;owned\x9c", "\x90q\x9c", "\x85", "\r", "\x08\x08\x08", "\x07", "\x7f",
    "\u202e", "\u2066", "\u200f", "\u2028", "\ufeff", "\x1b[1A\x1b[2K", "\x1b(0", "\x1b_x\x1b\\", "\x1b[?1049h",
    "\x1b]52;c;eA==\x07", "[link=http://x]a[/link]",
]  # fmt: skip
COMMANDS = [
    ["plan"], ["plan", "--output", "json"], ["plan", "--output", "github"], ["plan", "--output", "sarif"],
    ["plan", "--check"], ["plan", "--show", "environment"], ["launch", "--dry-run"], ["render", "-t", "slurm"],
    ["render", "-t", "k8s"], ["render", "-t", "torchrun"], ["launch", "--dry-run", "-t", "slurm"],
]  # fmt: skip


def _text(rng: random.Random) -> str:
    pieces = [rng.choice(FIXED) if rng.random() < 0.7 else chr(rng.randrange(0x20)) for _ in range(rng.randint(1, 4))]
    return "".join(part for piece in pieces for part in ("x", piece)) + "x"


def _spec(rng: random.Random, text: str) -> str:
    """Return a spec with the text somewhere in it, escaped or raw."""
    path = rng.choice(FREE) if rng.random() < 0.6 else rng.choice(PATHS)
    spec = json.loads(json.dumps(HEAD))
    section = spec
    for part in path[:-1]:
        section[str(part)] = section.get(str(part)) if isinstance(section.get(str(part)), dict) else {}
        section = section[str(part)]
    if path[-1] == "config":
        del spec["model"]
        spec["model"] = section = {}
    key = text if rng.random() < 0.1 else str(path[-1])
    section[key] = [text] if path[-1] == "tuned" else text
    more = rng.choice(["", "", "", f"# {text}\nlimits: x\n", f"limits: {text}\n", f"{text}\n"])
    lines = "\n".join(f"{name}: {json.dumps(value, ensure_ascii=rng.random() < 0.7)}" for name, value in spec.items())
    return lines + "\n" + more


def test_no_control_character_reaches_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARTOOL_HOME", str(tmp_path / "home"))
    attack = Attack("escapes", least=30)
    for number, rng in attack.cases():
        text = _text(rng)
        spec, command = _spec(rng, text), rng.choice(COMMANDS)
        name = "mine.yaml" if rng.random() < 0.9 else f"{text.replace('/', '')}.yaml"
        with attack.case(number, partial("{} {!r}\n{!r}".format, command, name, spec)):
            Path("mine.yaml").write_text(spec, encoding="utf-8")
            if "\0" not in name:
                Path(name).write_text(spec, encoding="utf-8")
            output, _ = on_a_terminal([command[0], *command[1:], "--", name], monkeypatch)
            assert not obeyed(output), obeyed(output)[:3]
            assert BLINK not in output, output
            assert "Traceback" not in output, output
    attack.judge()
