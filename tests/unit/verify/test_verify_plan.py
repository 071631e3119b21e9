"""``partool plan --verify`` and ``launch --dry-run --deep``: plans whose code was executed without devices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from planned import plan_of
from processes import is_running

from partool.cli._verify import _line
from partool.cli.main import run
from partool.plan.rank_trace import COMPUTE, Collective, MemoryOwner, MemoryTrace, RankTrace
from partool.plan.terms import MEMORY_TERMS
from partool.plan.types import Plan
from partool.verify import DryProgress, DryRunError, verified
from partool.verify import execute as execution
from partool.verify import verification as module
from partool.verify.memory import communicator_bytes, corrected

SPEC = """\
model: {hidden: 64, layers: 4, heads: 4, kv_heads: 2, vocab: 256, ffn_hidden: 96}
hardware: {accelerator: h100-sxm, nodes: 1, per_node: 4}
data: python-stdlib
training: {global_batch: 8, sequence_length: 64, steps: 3}
parallel: {tensor: 2, sequence: 1, pipeline: 2, compile: none, micro_batch: 1, recompute: none, offload: none}
"""
IN_TURN = SPEC.replace("per_node: 4", "per_node: 2").replace("tensor: 2", "tensor: 1")
"""Two ranks: those of tensor parallelism as well are executed in ``test_verify_matching``."""
GIB = 2**30


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    exit_code: int
    output: str
    stdout: str


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    def call(*words: str) -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run(words)
        shown = capsys.readouterr()
        return Done(int(ended.value.code or 0), shown.err + shown.out, shown.out)

    return call


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "spec.yaml").write_text(SPEC)
    return tmp_path / "spec.yaml"


@pytest.mark.timeout(120)
def test_a_plan_is_verified_on_a_machine_without_devices(spec: Path, command: Callable[..., Done]) -> None:
    """The plan, the page and the terminal hold what both ranks did; what runs keeps its hash."""
    spec.write_text(IN_TURN)
    out, page = spec.with_name("plan.json"), spec.with_name("plan.html")
    done = command("plan", str(spec), "--verify", "--out", str(out), "--html", str(page))
    assert done.exit_code == 0, done.output
    plan = Plan.from_json(out.read_text())
    found = plan.verification
    assert found is not None
    assert [(rank.rank, rank.pipeline_rank) for rank in found.ranks] == [(0, 0), (1, 1)]
    assert not found.findings
    assert all(rank.exchanges > 10 and rank.reserved_bytes >= rank.peak_bytes > 0 for rank in found.ranks)
    assert found.fullest == plan.prediction.memory.rank
    assert max(held for _, held in found.timeline) == found.ranks[found.fullest].peak_bytes
    assert found.owners
    command("plan", str(spec), "--out", str(spec.with_name("before.json")))
    before = Plan.from_json(spec.with_name("before.json").read_text())
    assert plan.hash == before.hash
    assert plan.prediction.memory != before.prediction.memory
    assert all(sum(rank.terms_bytes.values()) == rank.peak_bytes for rank in found.ranks)
    for memory in plan.prediction.memory.ranks:
        mine = [rank for rank in found.ranks if rank.pipeline_rank == memory.pipeline_rank]
        outside = ("communication", "framework", "fragmentation")
        inside = sum(size for name, size in memory.terms_bytes.items() if name not in outside)
        assert inside in [rank.peak_bytes - rank.terms_bytes.get("communication", 0) for rank in mine]
        assert memory.total_bytes > max(rank.reserved_bytes for rank in mine)
    assert done.output.index("Not executed: kernels") < done.output.index("All 2 ranks executed")
    assert "Tensors of rank" in done.output
    assert "Memory of the fullest rank: predicted" in done.output
    assert "Not executed: kernels" in page.read_text()
    assert 'id="verification-memory"' in page.read_text()


def test_launch_makes_the_dry_run_before_it_prints_what_would_run(
    spec: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., Done]
) -> None:
    monkeypatch.setattr(module, "execute", lambda plan, ranks, *_: tuple(trace(rank) for rank in ranks))
    spec.write_text(SPEC.replace("h100-sxm", "cpu") + "kernels: {mode: torch}\n")
    done = command("launch", str(spec), "--dry-run", "--deep")
    assert done.exit_code == 0, done.output
    assert "All 4 ranks executed" in done.output
    refused = command("launch", str(spec), "--deep")
    assert refused.exit_code == 2
    assert "--dry-run" in refused.output


def trace(rank: int, *order: int, peak_bytes: int = GIB, reserved_bytes: int = 2 * GIB) -> RankTrace:
    everyone = Collective("allreduce_", (0, 1, 2, 3), "", (4,), "float32", -1)
    pair = Collective("send" if rank < 2 else "recv_", (0, 1, 2, 3), "pipeline", (8,), "bfloat16", (rank + 2) % 4)
    terms = {"parameters": peak_bytes // 2, "working": peak_bytes - peak_bytes // 2}
    memory = MemoryTrace(
        peak_bytes=peak_bytes, terms_bytes=terms, owners=(), timeline=((1, peak_bytes),), reserved_bytes=reserved_bytes
    )
    return RankTrace(
        rank=rank, vocabulary=(everyone, pair), order=order or (0, COMPUTE, 1), operators=5, seconds=0.1, memory=memory
    )


def test_memory_is_corrected_by_the_fullest_rank_of_each_position() -> None:
    plan = plan_of(SPEC)
    traces = trace(0), trace(1, peak_bytes=3 * GIB, reserved_bytes=5 * GIB), trace(3)
    memory = corrected(plan, traces)
    first, second = memory.ranks
    assert first.terms_bytes["parameters"] == first.terms_bytes["activations"] == 3 * GIB // 2
    assert first.terms_bytes["fragmentation"] + first.idle_bytes == 2 * GIB
    assert first.idle_bytes > 0
    assert second.terms_bytes["parameters"] == GIB // 2
    assert memory.rank == 1
    assert memory.terms_bytes == first.terms_bytes
    assert set(first.terms_bytes) == set(MEMORY_TERMS)
    # One group of collectives of four ranks, one wire.
    assert communicator_bytes(plan, traces[0]) == (392 + 50) * 2**20 == first.terms_bytes["communication"]
    assert memory.sigma_bytes == plan.prediction.memory.sigma_bytes


def leaking(rank: int) -> RankTrace:
    found = trace(rank)
    assert found.memory is not None
    return found.model_copy(update={"memory": found.memory.model_copy(update={"leaked_bytes": 7 * (rank == 2)})})


@pytest.mark.parametrize(
    ("traces", "code", "text"),
    [
        ([trace(0), trace(1), trace(2), trace(3, 1, COMPUTE)], "PT59", "rank 3"),
        ([trace(rank, peak_bytes=200 * GIB, reserved_bytes=200 * GIB) for rank in range(4)], "PT599", "does not fit"),
        ([leaking(rank) for rank in range(4)], "PT696", "rank 2 holds 7 bytes more"),
    ],
    ids=["a rank that skips a collective", "more than the device has", "a tensor that stays"],
)
def test_faults_end_the_command(
    spec: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[..., Done],
    traces: list[RankTrace],
    code: str,
    text: str,
) -> None:
    monkeypatch.setattr(module, "execute", lambda *_: tuple(traces))
    done = command("plan", str(spec), "--verify")
    assert done.exit_code == 1
    assert f"error[{code}" in done.output
    assert text in done.output
    machine: dict[str, Any] = json.loads(command("plan", str(spec), "--verify", "--output", "json").stdout)
    assert machine["verification"]["ranks"][0]["rank"] == 0


@pytest.mark.timeout(60)
def test_what_a_dry_run_cannot_do_is_named(
    spec: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., Done]
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    done = command("plan", str(spec), "--verify")
    assert done.exit_code == 3
    assert "error[PT516]" in done.output
    assert "\nMemory " in done.output, "the plan is shown"
    monkeypatch.setattr("partool.verify.execute._MODULE", "partool_runtime.no_such_module")
    with pytest.raises(DryRunError) as caught:
        verified(plan_of(SPEC))
    assert caught.value.code == "PT598"
    assert "no_such_module" in caught.value.message


@pytest.fixture
def sleeping(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let ranks sleep instead of being executed; return the folder of files with their process ids as names."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    lines = (
        "import os, pathlib, time",
        "(pathlib.Path(__file__).parent / f'{os.getpid()}.pid').touch()",
        "time.sleep(60)",
    )
    (tmp_path / "sleeping_ranks.py").write_text("\n".join(lines))
    monkeypatch.setattr(execution, "_MODULE", "sleeping_ranks")
    return tmp_path


def all_gone(folder: Path) -> bool:
    """Return whether ranks slept in processes, all of which have ended."""
    pids = [int(file.stem) for file in folder.glob("*.pid")]
    return bool(pids) and not any(is_running(pid) for pid in pids)


@pytest.mark.timeout(60)
def test_a_rank_that_takes_too_long_is_ended(sleeping: Path) -> None:
    progress = DryProgress()
    with pytest.raises(DryRunError, match="rank 0 took more than 2 s") as caught:
        execution.execute(plan_of(SPEC), (0,), progress, limit_s=2.0)
    assert (caught.value.code, progress.ranks, progress.running) == ("PT698", 1, [0])
    assert all_gone(sleeping)


SIGNALLED = """\
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
from partool.plan.types import Plan
from partool.verify import execute
execute._MODULE = "sleeping_ranks"
execute.execute(Plan.from_json(Path(sys.argv[1]).read_text()), (0,))
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ranks_end_with_the_command(sleeping: Path, number: signal.Signals) -> None:
    (sleeping / "plan.json").write_text(plan_of(SPEC).to_json())
    with subprocess.Popen([sys.executable, "-c", SIGNALLED, str(sleeping / "plan.json")], stderr=-3) as command:
        while not list(sleeping.glob("*.pid")):
            time.sleep(0.05)
        command.send_signal(number)
        code = command.wait(20)
    assert code == {signal.SIGTERM: 143, signal.SIGINT: -signal.SIGINT}[number]
    assert all_gone(sleeping)


def test_a_line_says_which_ranks_run() -> None:
    assert _line(DryProgress(24, 3, [4, 17]), 12.3) == "partool: 12 s, 3 of 24 ranks done, running: rank 4, 17"


def test_a_verified_plan_and_the_same_plan_without_a_dry_run(
    spec: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., Done]
) -> None:
    monkeypatch.setattr(module, "execute", lambda *_: tuple(trace(rank) for rank in range(4)))
    out, verified_out = spec.with_name("plan.json"), spec.with_name("verified.json")
    command("plan", str(spec), "--out", str(out))
    done = command("plan", str(spec), "--verify", "--out", str(verified_out), "--against", str(out))
    assert done.exit_code == 0
    assert "the plans run the same; only the new one was dry-run: 3." in done.output
    again = command("plan", str(spec), "--diff", str(verified_out))
    assert "Only the old one was dry-run" in again.output
    told = json.loads(command("plan", str(verified_out), "--against", str(out), "--output", "json").stdout)
    assert told["same"]
    assert told["verified"].startswith("only the new one")


def test_more_memory_than_planned_is_a_warning(
    spec: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., Done]
) -> None:
    owners = (MemoryOwner("gathered", "aten::empty", GIB, 4, "layers.*.ffn"),)
    traces = [trace(rank) for rank in range(4)]
    memory = traces[3].memory
    assert memory is not None
    kept = memory.model_copy(update={"terms_bytes": {"gathered": GIB}, "owners": owners})
    traces[3] = traces[3].model_copy(update={"memory": kept})
    monkeypatch.setattr(module, "execute", lambda *_: tuple(traces))
    done = command("plan", str(spec), "--verify")
    assert done.exit_code == 0, done.output
    words = " ".join(done.output.split())
    assert (
        "! PT697 rank 3 holds 1.00 GiB of gathered at its peak, 1.00 GiB more than planned; most in empty of" in words
    )
    assert "layers.*.ffn (gathered, 4 × 256 MiB) (parallel.data)" in words
    assert command("plan", str(spec), "--verify", "--strict").exit_code == 1


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("parallel", ["{pipeline: 1, data: {zero: 3}}", "{pipeline: 2}"])
def test_models_of_transformers_are_executed_for_gpus(spec: Path, command: Callable[..., Done], parallel: str) -> None:
    """Their rotary frequencies have values, and are moved to a device that does not exist."""
    spec.with_name("config.json").write_text(json.dumps(CONFIG))
    text = SPEC.replace(SPEC[SPEC.index("{hidden") : SPEC.index("\nhardware")], "{hf: .}")
    text = text.replace("per_node: 4", "per_node: 2").replace(SPEC[SPEC.index("{tensor") :].strip(), parallel)
    spec.write_text(text)
    done = command("plan", str(spec), "--verify")
    assert done.exit_code == 0, done.output
    assert "All 2 ranks executed" in done.output
    again = command("plan", str(spec), "--verify", "--check")
    assert again.exit_code == 2


@pytest.mark.long
@pytest.mark.timeout(170)
def test_experts_on_more_ranks_than_are_executed(spec: Path, command: Callable[..., Done]) -> None:
    """Of 16 ranks, each stage's first and last tensor rank run, and two ranks that exchange tokens with each other."""
    moe = "{experts: 8, top_k: 2, ffn_hidden: 48, shared_experts: 1, first_dense_layers: 1}"
    text = SPEC.replace("ffn_hidden: 96", f"ffn_hidden: 96, moe: {moe}").replace(
        "nodes: 1, per_node: 4", "per_node: 16"
    )
    spec.write_text(
        text.replace("pipeline: 2,", "pipeline: 2, expert: 8,").replace("global_batch: 8", "global_batch: 16")
    )
    out = spec.with_name("plan.json")
    done = command("plan", str(spec), "--verify", "--out", str(out))
    assert done.exit_code == 0, done.output
    found = Plan.from_json(out.read_text()).verification
    assert found is not None
    assert not found.findings
    assert {rank.pipeline_rank for rank in found.ranks} == {0, 1}
    assert 4 <= len(found.ranks) < 16
