"""Time from command to first training step under Slurm: ``partool launch`` against hand-written sbatch + torchrun.

Both train the same plan on two nodes with two ranks each of the tests' own cluster, in alternation. The hand-written
job starts torchrun with the c10d rendezvous on each node and, in each rank, partool's own trainer: only the start-up
differs (planning is not included: a plan is launched). The end is the time in rank 0's first ``step`` event.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _record import write

sys.path += [str(Path(__file__).parents[1] / "launch"), str(Path(__file__).parents[1] / "launch/slurm")]
from slurm_cluster import Cluster, unavailable
from slurm_runs import Login, cluster_plan

ROUNDS = 5
TIMEOUT_S = 180
BY_HAND = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --time=10 --output={folder}/job.out
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
export OMP_NUM_THREADS=1
srun {python} -m torch.distributed.run --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d \\
  --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:29500" \\
  -m partool_runtime.worker {folder}/plan.json --run-dir {folder}
"""


def first_step(run_dir: Path, start: float) -> float:
    """Wait for rank 0's first step; return the seconds since a Unix time."""
    file = run_dir / "events/rank-0.jsonl"
    while time.time() < start + TIMEOUT_S:
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
            if '"step"' in line and line.endswith("}") and (event := json.loads(line))["kind"] == "step":
                return float(event["t"]) - start
        time.sleep(0.05)
    raise TimeoutError(f"no step in {run_dir}")


def by_partool(login: Login, plan: Path) -> float:
    """Launch a plan; return the seconds to its first step."""
    before = set((login.folder / "home/runs").glob("*"))
    start = time.time()
    login.partool("launch", plan, "--again")
    (run_dir,) = set((login.folder / "home/runs").glob("*")) - before
    return first_step(run_dir, start)


def by_hand(login: Login, plan: Path, index: int) -> float:
    """Submit a script to sbatch; return the seconds to its first step."""
    folder = login.folder / f"hand-{index}"
    folder.mkdir()
    (folder / "plan.json").write_text(plan.read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "job.sh").write_text(BY_HAND.format(folder=folder, python=sys.executable), encoding="utf-8")
    environment = login.environment | {"PARTOOL_ATTEMPT": "1"}
    start = time.time()
    subprocess.run(["sbatch", folder / "job.sh"], env=environment, check=True, capture_output=True)
    return first_step(folder, start)


def settle(cluster: Cluster) -> None:
    """Wait until the queue is empty."""
    while cluster.jobs():
        time.sleep(0.2)


def main() -> None:
    """Measure in alternation and write the difference of the medians."""
    if reason := unavailable():
        sys.exit(reason)
    ours, hand = [], []
    with tempfile.TemporaryDirectory() as name, Cluster(nodes=2) as cluster:
        login = Login(cluster, Path(name))
        (login.folder / "home/runs").mkdir(parents=True)
        plan = login.write(cluster_plan(login.folder, 3), "start")
        by_partool(login, plan)  # builds the data cache that both use
        settle(cluster)
        for index in range(ROUNDS):
            ours.append(by_partool(login, plan))
            settle(cluster)
            hand.append(by_hand(login, plan, index))
            settle(cluster)
    result = {
        "rounds": ROUNDS,
        "nodes": 2,
        "ranks_per_node": 2,
        "partool_s": ours,
        "sbatch_torchrun_s": hand,
        "partool_median_s": statistics.median(ours),
        "sbatch_torchrun_median_s": statistics.median(hand),
        "difference_s": statistics.median(ours) - statistics.median(hand),
        "goal_difference_s": 1.0,
        "load": os.getloadavg()[0],
    }
    write("slurm_start", result, "torch")


if __name__ == "__main__":
    main()
