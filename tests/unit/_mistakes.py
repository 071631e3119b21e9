"""Specs with several mistakes, made of the sections in which the examples of rules break their rule."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from partool.diagnostics.rules import RULES
from partool.planner import check_rest, make_plan
from partool.planner.resolve import resolve
from partool.spec import load_text
from partool.spec._source import Source
from partool.spec._yaml import parse

FOLDER = Path("/base")
BASE: dict[str, Any] = {
    "model": {"layers": 4, "hidden": 64, "heads": 4, "vocab": 512},
    "hardware": {"accelerator": "cpu", "per_node": 2},
    "training": {"steps": 900, "global_batch": 48},
    "data": "python-stdlib",
}
"""A spec without findings; sections of examples replace its sections."""
NEEDS = {
    "parallel": {"model", "hardware", "training"},
    "kernels": {"model", "hardware", "parallel"},
    "training": {"model", "hardware", "data"},
    "hardware": {"training"},
    "model": {"data", "training"},
    "adapter": {"model"},
}
"""Section → sections whose values the planner's rules about it read; mistakes in those may hide mistakes in it."""
Found = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Mistake:
    """A section of the example that breaks a rule, and the section of the corrected example, both as JSON."""

    code: str
    section: str
    bad: str
    good: str

    @property
    def alone(self) -> Found:
        """What is found if all other sections are those of the spec without findings."""
        return found_in(((self.section, self.bad),))

    @property
    def read(self) -> bool:
        """Whether the rule is one of the loader, which needs only the spec."""
        text = text_of(((self.section, self.bad),))
        return self.code in {finding.code for finding in load_text(text).diagnostics}


def mistakes() -> list[Mistake]:
    """Return the mistakes of all examples that differ from their correction in one section."""
    made = []
    for code, rule in RULES.items():
        if rule.example != "spec":
            continue
        bad, good = (parse(Source("example", text))[0] for text in (rule.bad, rule.good))
        if not isinstance(bad, dict) or not isinstance(good, dict):
            continue
        differ = [name for name in bad.keys() | good.keys() if bad.get(name) != good.get(name)]
        if len(differ) == 1 and differ[0] in bad and code != "PT009":  # an alias of itself
            (name,) = differ
            made.append(Mistake(code, name, json.dumps(bad[name]), json.dumps(good.get(name, {}))))
    return made


def drawn(seed: int, count: int) -> list[tuple[Mistake, ...]]:
    """Return pairs and triples of mistakes in different sections, each of which is found when it is alone."""
    random, every, made = Random(seed), mistakes(), []
    while len(made) < count:
        chosen = tuple(random.sample(every, random.choice((2, 3))))
        if len({each.section for each in chosen}) == len(chosen) and all(
            each.code in {code for code, _ in each.alone} for each in chosen
        ):
            made.append(chosen)
    return made


def text_of(sections: tuple[tuple[str, str], ...]) -> str:
    """Return a spec with these sections, given as (name, JSON)."""
    lines = {name: json.dumps(value) for name, value in BASE.items()} | dict(sections)
    return "".join(f"{name}: {value}\n" for name, value in lines.items())


@cache
def found_in(sections: tuple[tuple[str, str], ...]) -> Found:
    """Return code and message of every finding that one run of the planner makes before it searches for a layout."""
    loaded = load_text(text_of(sections))
    findings = list(loaded.diagnostics)
    if loaded.rest is not None:
        findings += check_rest(loaded.rest, FOLDER, findings)
    elif loaded.spec is not None:
        resolved = resolve(loaded.spec, FOLDER)
        searches = resolved.problem is not None
        findings += (
            resolved.diagnostics if searches else make_plan(loaded.spec, base_dir=FOLDER, default_name="x").diagnostics
        )
    return frozenset((finding.code, finding.message) for finding in findings)
