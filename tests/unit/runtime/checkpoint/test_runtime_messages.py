"""Checkpoint messages between ranks are JSON, and only listed types are decoded from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

from partool_runtime.checkpoint import Checkpointer
from partool_runtime.checkpoint._agreement import SavingRanks
from partool_runtime.checkpoint._manifest import read_manifest, step_folder
from partool_runtime.checkpoint._messages import decode, encode
from partool_runtime.checkpoint._metadata import read_metadata
from partool_runtime.checkpoint._plan import make_plan


def test_what_is_sent_comes_back(tmp_path: Path) -> None:
    state = {"model.a": torch.ones(3, 5), "model.b": torch.ones(2, dtype=torch.bfloat16), "exp_avg.a": torch.ones(())}
    checkpointer = Checkpointer(tmp_path, keep=1, mode="sync", rank=0, world_size=1)
    checkpointer.save(1, state, {"step": 1, "text": "ü", "none": None, "list": [1.5, True]}, wait=True)
    checkpointer.close()
    path = step_folder(tmp_path, 1)
    manifest = read_manifest(path)
    sizes = {name: size for name, (size, _) in manifest.files.items()}
    plan = make_plan(state, SavingRanks(0, 1, timeout_s=0))
    metadata = read_metadata((path / ".metadata").read_bytes(), sizes)
    for value in (
        manifest, plan.items.items, plan.metadata, metadata, {"a": ((3, 5), torch.float32)},
        (None, (0, "PT1", "x", "")), MetadataIndex("a"),
        MetadataIndex("a", [1, 2], 3), torch.Size([1, 2]), TensorProperties(torch.float16), [],
    ):  # fmt: skip
        back = decode(encode(value))
        assert back == value
        assert type(back) is type(value)


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", torch.ones(2), lambda: None])
def test_other_values_are_not_sent(value: object) -> None:
    with pytest.raises(TypeError, match="not sent between ranks"):
        encode(value)


@pytest.mark.parametrize(
    "message",
    [{"Popen": ["touch x"]}, {"torch": "load"}, {"torch": "ops"}, {"a": 1, "b": 2}, {}, {"size": "x"}, {"write": 99},
     {"MetadataIndex": ["a"]}, {"dict": [[{"dict": []}, 1]]}, {"tuple": 3}],
)  # fmt: skip
def test_strange_messages_are_refused(message: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(json.dumps(message).encode())
