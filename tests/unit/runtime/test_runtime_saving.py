"""Durations between checkpoints."""

from __future__ import annotations

import pytest

from partool.spec.numbers import duration_s


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30min", 1800), ("1.5h", 5400), (" 2 d ", 172800)])
def test_durations(text, seconds):
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "min", "-5min", "3 fortnights", "0s", "0.0h"])
def test_what_is_no_duration_is_refused(text):
    assert duration_s(text) is None
