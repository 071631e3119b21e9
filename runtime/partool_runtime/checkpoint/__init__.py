"""Checkpoints: sharded, asynchronous, atomic, and independent of the layout that they were saved from.

A checkpoint is a folder in the format of ``torch.distributed.checkpoint`` (DCP) plus ``manifest.json``, which holds the
step, the caller's JSON and the size and checksum of every file. The folder must lie on a file system that all ranks
share.
"""

from partool_runtime.checkpoint._arena import Arena, open_arena
from partool_runtime.checkpoint._manifest import (
    CheckpointExtra,
    CheckpointManifest,
    newest_step,
    read_manifest,
    step_folder,
    steps_in,
)
from partool_runtime.checkpoint._plan import StatePart, parts_to_save
from partool_runtime.checkpoint._reading import VerifiedFolder, load_folder, parts_to_load, tensor_shapes
from partool_runtime.checkpoint.checkpointer import Checkpointer, Resumed, WriteStats, load_newest
from partool_runtime.errors import CheckpointError

__all__ = [
    "Arena",
    "CheckpointError",
    "CheckpointExtra",
    "CheckpointManifest",
    "Checkpointer",
    "Resumed",
    "StatePart",
    "VerifiedFolder",
    "WriteStats",
    "load_folder",
    "load_newest",
    "newest_step",
    "open_arena",
    "parts_to_load",
    "parts_to_save",
    "read_manifest",
    "step_folder",
    "steps_in",
    "tensor_shapes",
]
