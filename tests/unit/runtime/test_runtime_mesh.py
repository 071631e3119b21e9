"""Errors that joining the process group raises before anything is started."""

from __future__ import annotations

import pytest
import torch

from partool_runtime.errors import ConfigurationError
from partool_runtime.mesh import _device


def test_accelerators_that_are_not_here_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigurationError, match="needs number 1, torch sees 1") as caught:
        _device("cuda")
    assert caught.value.code == "PT513"
    assert _device("cpu") == torch.device("cpu")
