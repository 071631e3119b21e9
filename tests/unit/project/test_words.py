"""Names say what they hold (docs/design/words.md)."""

from __future__ import annotations

from pathlib import Path

import house
from words import VAGUE, assigned, package_of, vague_names

ROOT = Path(__file__).parents[3]


def test_no_vague_name_is_assigned() -> None:
    counts = {package: names.total() for package, names in sorted(vague_names(house.modules(ROOT)).items())}
    assert {package: count for package, count in counts.items() if count} == {}


def test_vague_names_are_seen_wherever_they_are_assigned(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(
        "found = 1\ndef known(own, *, whole=1): pass\nclass There:\n    held: int\n"
        "for left in []: pass\nx.told = 2\n_done = [again for again in []]\nplain = found.coming\n"
    )
    names = {name.lstrip("_") for name in assigned(file)} & VAGUE
    assert names == {"found", "known", "own", "whole", "held", "left", "told", "done", "again"}
    assert package_of("partool.cost.memory.peak") == "partool.cost.memory"
    assert package_of("partool.launch.slurm.logs") == "partool.launch"
