"""Ranks of test_trainer_data.py: the trainer with a note of every sequence it trained on."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from _trainer_worker import main

from partool_runtime.data import MicroBatch
from partool_runtime.stepping import Stepper


def note_sequences(folder: Path) -> None:
    step_of_trainer = Stepper.step
    path = folder / f"seen-{os.environ['WORLD_SIZE']}.rank-{os.environ['RANK']}.jsonl"

    def step(self: Stepper, number: int, batch: list[MicroBatch], *rest: object) -> object:
        rows = [row for micro in batch for row in micro.tokens_BS.tolist()]
        with path.open("a") as file:
            file.write(json.dumps([number, rows]) + "\n")
        return step_of_trainer(self, number, batch, *rest)

    Stepper.step = step


if __name__ == "__main__":
    note_sequences(Path(sys.argv[1]).parent)
    main(sys.argv[1])
