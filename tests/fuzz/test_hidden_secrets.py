"""Secrets of every kind in every place of a spec: no output of partool may repeat one.

A secret that is recognised by its form, or by a key that the user chose, is refused in every place of the spec except
comments, where it is accepted but never printed.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from _attack import Attack

from partool.cli.main import run
from partool.spec._pydantic import all_paths
from partool.spec._source import SpecPath

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from _secret_cases import NAMES, pem, token, valued, word

HEAD = """\
model: {layers: 2, hidden: 64, heads: 4, vocab: 256}
hardware: {accelerator: h100-sxm, per_node: 1}
data: python-stdlib
training: {steps: 10}
"""
OPEN = [
    ("launch", "env"),
    ("launch", "env"),
    ("launch", "secrets"),
    ("launch", "slurm"),
    ("launch", "slurm", "options"),
    ("launch", "k8s", "annotations"),
    ("launch", "k8s", "labels"),
    ("launch", "k8s", "node_selector"),
    ("training",),
]
PATHS = sorted(all_paths(), key=str)


@dataclass
class Planted:
    """Lines of a spec and words of a command line, and the parts of them that must never be printed."""

    hidden: list[str]
    lines: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    refused: bool = True
    profile: str = ""


def _section(path: SpecPath, last: list[str]) -> list[str]:
    """Return the lines of nested sections; the lines of ``last`` are in the innermost one."""
    lines = [f"{'  ' * depth}{name}:" for depth, name in enumerate(path)]
    return lines + ["  " * len(path) + line for line in last]


def _by_name(rng: random.Random) -> Planted:
    name, secret = rng.choice(NAMES), word(rng)
    entry = rng.choice(
        [
            [f"{name}: {secret}"],
            [f"{name}: {json.dumps(secret)}  # mine"],
            [f"{name}: {rng.choice('|>')}", f"  {secret}", f"  {secret}"],
            [f"{name}: [{secret}]"],
            [f"{name}:", f"- {secret}"],
            [f"{name}:", f"    value: {secret}"],
            [f"{name}: !{secret} x"],
            [f"{name}: *{secret.rstrip('!')}"],
            [f"{name}: '{secret}", f"    {secret}'"],
            ["A: 1", f"{name}: {{x: {secret}}}", "B: x"],
        ]
    )
    return Planted([secret], _section(rng.choice(OPEN), entry))


def _in_a_list(rng: random.Random) -> Planted:
    name, secret = rng.choice(NAMES), word(rng)
    form = rng.choice(["- {0}={1}", "- {0}: {1}", "- {{name: {0}, value: {1}}}", "- name: {0}\n      value: {1}"])
    return Planted([secret], _section(("launch", "env"), form.format(name, secret).split("\n")))


def _misunderstood(rng: random.Random) -> Planted:
    secret, made = word(rng), token(rng)
    form = rng.choice(
        ["A: {0}", "A: {{value: {0}}}", "A: |\n      {0}", "A: [{0}]", "A: {{secret: {1}_}}", "A: {{key: '{1} '}}"]
    )
    return Planted([secret, made], _section(("launch", "secrets"), form.format(secret, made).split("\n")))


def _by_form(rng: random.Random) -> Planted:
    text, hidden = valued(rng)
    path: SpecPath = rng.choice([path for path in PATHS if path[0] != "spec"])
    if rng.random() < 0.5:
        path = rng.choice(
            [
                ("launch", "env", "A"),
                ("launch", "k8s", "annotations", "example.com/x"),
                ("launch", "image"),
                ("data", "source"),
            ]
        )
    lines = _section(path[:-1], [f"{path[-1]}: {json.dumps(text)}"])
    return Planted(
        [hidden], [line for line in lines if line != "data:"] if path[0] == "data" and len(path) == 1 else lines
    )


def _as_a_key(rng: random.Random) -> Planted:
    made = token(rng)
    path = rng.choice(
        [(), ("training",), ("launch", "env"), ("launch", "k8s", "labels"), ("launch", "slurm", "options")]
    )
    return Planted([made], _section(path, [f"{made}: x"]))


def _private_key(rng: random.Random) -> Planted:
    text, body = pem(rng)
    return Planted(body, _section(("launch", "env"), ["A: |", *(f"  {line}" for line in text.split("\n")), "B: 1"]))


def _commented(rng: random.Random) -> Planted:
    text, hidden = valued(rng)
    name, secret = rng.choice(NAMES), word(rng)
    lines = rng.choice([[f"# {text}"], [f"# export {name}={secret}"], [f"# {name}: {secret}"]])
    return Planted(
        [hidden, secret],
        [*lines, *rng.choice([[], ["training: {stpes: 1}"], ["parallel: {tensor: x}"]])],
        refused=False,
    )


def _exported(rng: random.Random) -> Planted:
    name, secret = rng.choice(NAMES), word(rng).rstrip("!")
    option = rng.choice(["export", "comment", "wckey", "mail-user"])
    return Planted([secret], _section(("launch", "slurm", "options"), [f'{option}: "ALL,{name}={secret}"']))


def _overridden(rng: random.Random) -> Planted:
    name, secret = rng.choice(NAMES), word(rng)
    text, hidden = valued(rng)
    where = ".".join(map(str, rng.choice([path for path in PATHS if path[0] != "spec"])))
    value = rng.choice(
        [
            f"launch.env.{name}={secret}",
            f"launch.env={{{name}: {secret}}}",
            f"launch={{env: {{A: 1, {name}: '{secret}'}}}}",
            f"launch.secrets.{name}={secret}",
            f"{name}={secret}",
            f"{name}:{secret}",
            f"launch.env.A={json.dumps(text)}",
            f"{where}={json.dumps(text)}",
            token(rng),
        ]
    )
    option = "--vary" if rng.random() < 0.2 and "=" in value and "," not in value else "--set"
    return Planted([secret, hidden, value if "=" not in value and ":" not in value else secret], words=[option, value])


def _in_a_profile(rng: random.Random) -> Planted:
    planted = _exported(rng)
    planted.profile = "\n".join(line.removeprefix("    ") for line in planted.lines[2:]) + "\n"
    planted.lines = _section(("launch",), ["target: slurm", "slurm: {profile: site.yaml}"])
    return planted


PLANTERS: list[Callable[[random.Random], Planted]] = [
    _by_name, _by_name, _in_a_list, _misunderstood, _by_form, _by_form, _as_a_key, _private_key, _commented, _exported,
    _overridden, _overridden, _in_a_profile,
]  # fmt: skip
COMMANDS = [
    ["plan"], ["plan", "--output", "json"], ["plan", "--output", "github"], ["plan", "--output", "sarif"],
    ["plan", "--check"], ["plan", "--check", "--output", "json"], ["launch", "--dry-run"], ["render", "-t", "slurm"],
    ["render", "-t", "k8s"], ["launch", "--dry-run", "-t", "slurm"], ["plan", "--show", "environment"],
]  # fmt: skip


def said(words: list[str]) -> tuple[str, int]:
    """Return a command's whole output and its exit code."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            run(words)
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
    return out.getvalue(), code


def _spec(planted: Planted, rng: random.Random) -> str:
    lines = HEAD.splitlines()
    merged = [line for line in lines if not (planted.lines and line.split(":")[0] == planted.lines[0].split(":")[0])]
    before = rng.choice([[], [], [], ["limits: {x"], ["limits: x"]])
    after = rng.choice([[], [], [], ["optimizer: ]"], ["optimizer: {lr: fast}"]])
    return "\n".join([*merged, *before, *planted.lines, *after]) + "\n"


def test_no_secret_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARTOOL_HOME", str(tmp_path / "home"))
    attack = Attack("secrets", least=60)
    for number, rng in attack.cases():
        planted = rng.choice(PLANTERS)(rng)
        text = _spec(planted, rng)
        command = rng.choice(COMMANDS)
        if "--vary" in planted.words and command[0] != "plan":
            command = ["plan"]
        told = f"{command} {planted.words}\n{text}{planted.profile}"
        with attack.case(number, partial(str, told)):
            Path("mine.yaml").write_text(text, encoding="utf-8")
            Path("site.yaml").write_text(planted.profile, encoding="utf-8")
            output, code = said([command[0], "mine.yaml", *command[1:], *planted.words])
            shown = [secret for secret in planted.hidden if secret in output]
            assert not shown, f"{shown} in:\n{output}"
            assert "Traceback" not in output
            assert "--debug" not in output, output
            assert code != 0 or not planted.refused or "--vary" in planted.words, f"accepted:\n{output}"
    attack.judge()
