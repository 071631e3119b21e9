"""An exported model stops at the token that ends an answer, which its base may not name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _chat_case import MARKED, folder

from partool.spec.data import DataSpec
from partool_runtime import export


@pytest.mark.parametrize(("before", "count"), [(None, 1), (7, 2), ([7, 8], 3)])
def test_the_end_of_an_answer_is_added(tmp_path: Path, before: Any, count: int) -> None:
    from tokenizers import Tokenizer

    tokenizer = folder(tmp_path / "tok", MARKED)
    end = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).token_to_id("<|end|>")
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text(json.dumps({"eos_token_id": before}))
    plan: Any = SimpleNamespace(data=DataSpec(source="a", records="chat", tokenizer=str(tokenizer)))
    assert f"stops at token {end}" in export._stop_at_turn_end(plan, out)
    stops = json.loads((out / "generation_config.json").read_text())["eos_token_id"]
    assert (stops if isinstance(stops, list) else [stops])[-1] == end
    assert len(stops if isinstance(stops, list) else [stops]) == count
    first = (out / "generation_config.json").read_text()
    export._stop_at_turn_end(plan, out)
    assert (out / "generation_config.json").read_text() == first, "it is added once"


def test_texts_change_nothing(tmp_path: Path) -> None:
    plan: Any = SimpleNamespace(data=DataSpec(source="a"))
    (tmp_path / "config.json").write_text("{}")
    assert export._stop_at_turn_end(plan, tmp_path) == ""
    assert not (tmp_path / "generation_config.json").exists()
