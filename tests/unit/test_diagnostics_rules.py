"""Every rule of the spec has an example that breaks it and one that does not."""

from __future__ import annotations

import pytest

from partool.diagnostics import _texts_files, _texts_spec
from partool.diagnostics.rules import RULES, Rule, nearest
from partool.spec import load_text

OF_A_SPEC = [rule for module in (_texts_files, _texts_spec) for rule in module.RULES if rule.example == "spec"]


@pytest.mark.parametrize("rule", OF_A_SPEC, ids=lambda rule: rule.code)
def test_examples(rule: Rule) -> None:
    assert rule.code in {d.code for d in load_text(rule.bad).diagnostics}
    assert load_text(rule.good).diagnostics == []


def test_codes_are_unique_and_found_when_mistyped() -> None:
    tables = [_texts_files.RULES, _texts_spec.RULES]
    listed = [rule.code for table in tables for rule in table]
    assert len(listed) == len(set(listed))
    assert set(listed) <= set(RULES)
    assert "PT204" in nearest("pt204x")
