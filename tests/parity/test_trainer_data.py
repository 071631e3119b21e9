"""A run that stops on two ranks and goes on with one trains on exactly the sequences of an unbroken run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from _chat_case import MARKED
from _chat_case import folder as tokenizer_folder
from _jobs import Jobs
from _plans import small_plan, write_text
from _ranks import Pools
from _trainer_worker import train_and_note

from partool.spec.data import DataSpec
from partool_runtime.data import open_data

STEPS = 8


def seen(folder: Path, ranks: int) -> dict[int, list[tuple[int, ...]]]:
    """Return the sequences of every step, over the ranks."""
    steps: dict[int, list[tuple[int, ...]]] = {}
    for rank in range(ranks):
        for line in (folder / f"seen-{ranks}.rank-{rank}.jsonl").read_text().splitlines():
            step, rows = json.loads(line)
            steps.setdefault(step, []).extend(map(tuple, rows))
    return steps


def conversations(folder: Path) -> DataSpec:
    """Return conversations of 2 to 30 words, several of which share a sequence."""
    lines = [
        {"messages": [{"role": "user", "content": f"what is {n}?"}, {"role": "assistant", "content": "the cat " * n}]}
        for n in [1 + (7 * number) % 15 for number in range(90)]
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    tokenizer = tokenizer_folder(folder / "tok", MARKED)
    return DataSpec(source=str(folder / "a.jsonl"), records="chat", attend="document", tokenizer=str(tokenizer))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("chat", [False, True])
def test_resuming_on_other_ranks_loses_and_doubles_no_sequence(pools: Pools, tmp_path: Path, chat: bool) -> None:
    write_text(tmp_path / "text")
    longer, model = {"sequence_length": 64}, {"vocab": 500 if chat else 257}
    two = small_plan(tmp_path / "text", ranks=2, zero=1, steps=STEPS, training=longer, model=model)
    one = small_plan(tmp_path / "text", ranks=1, zero=2, accumulation=3, steps=STEPS, training=longer, model=model)
    if chat:
        data = conversations(tmp_path).model_copy(update={"cache": str(tmp_path / "cache")})
        two, one = (plan.model_copy(update={"data": data}) for plan in (two, one))
    jobs = Jobs(tmp_path, pools, train_and_note)
    jobs.train("two", two, run="run", stop_at=3)
    assert all("Preempted" in jobs.ended("two", rank) for rank in range(2))
    jobs.train("one", one, run="run", resume=True)
    assert jobs.ended("one") == "done"

    first, second = seen(tmp_path, 2), seen(tmp_path, 1)
    assert sorted(first) == [0, 1, 2]
    assert sorted(second) == [3, 4, 5, 6, 7]
    with open_data(one, dp_rank=0, dp_size=1, barrier=lambda: None) as unbroken:
        for step, rows in (first | second).items():
            expected = [tuple(row) for micro in unbroken.step(step) for row in micro.tokens_BS.tolist()]
            assert rows == expected
        epoch = unbroken.samples_per_epoch
        every = Counter(tuple(unbroken._train.row(number)[:-1].clip(min=0).tolist()) for number in range(epoch))
    assert epoch < 12 * STEPS, "the run is to cross into a second epoch"
    in_order = [row for step in range(STEPS) for row in (first | second)[step]]
    assert Counter(in_order[:epoch]) == every
