"""Rules for batch scripts: for each, a script that breaks it, the line, and the corrected script."""

from __future__ import annotations

import pytest

from partool.diagnostics.rules import RULES as TEXTS
from partool.render.slurm import lint as slurm_lint
from partool.render.slurm.lint import lint

TORCHRUN = "torchrun --nnodes=2 --nproc-per-node=8 train.py"


def script(*lines: str, body: str = f"srun {TORCHRUN}", nodes: str = "--nodes=2 --ntasks-per-node=1") -> str:
    header = "".join(f"#SBATCH {line}\n" for line in (nodes, *lines) if line)
    return f"#!/bin/bash\n{header}\n{body}\n"


GOOD = [
    script(),
    script("--gpus-per-node=8", "--mem=0", "-c 64", body=f"srun -c $SLURM_CPUS_PER_TASK {TORCHRUN}"),
    script("--gpus=16", "--gpus-per-node=8"),
    script("--gpus-per-task=1", "-n 16", nodes="--nodes=2", body="srun python train.py"),
    script("--gres=gpu:8,tmpdisk:100", "--gres-flags=enforce-binding"),
    script(body="srun bash -c 'torchrun --nnodes=2 --node-rank=$SLURM_NODEID train.py'"),
    script(body='srun bash -c "torchrun --nnodes=2 --node-rank=\\$SLURM_NODEID train.py"'),
    script(body=f'LAUNCHER="{TORCHRUN}"\nsrun $LAUNCHER'),
    script(body=f"srun \\\n  --label \\\n  {TORCHRUN}"),
    script(body="cat > node.sh <<'END'\n#SBATCH --nodes=9\ntorchrun --node-rank=$SLURM_NODEID\nEND\nsrun bash node.sh"),
    script(body="# torchrun on one node: $SLURM_NODEID\nsrun " + TORCHRUN),
    script(body="srun --nodes=1 --ntasks=1 hostname\nsrun " + TORCHRUN),
    script(
        "--signal=B:USR2@300",
        body=f"trap 'n=$((n + 1)); kill -USR2 \"$child\"' USR2\nsrun {TORCHRUN} &\nchild=$!\nwait",
    ),
    script("--cpus-per-task=64", body=f"export SRUN_CPUS_PER_TASK=64\nsrun {TORCHRUN}"),
    script(nodes="--nodes=1", body="torchrun --standalone --nproc-per-node=8 train.py"),
    script(nodes="", body="python train.py"),
    script("--ntasks-per-node=8", nodes="--nodes=2", body="srun python train.py"),
    script("# a remark", "##SBATCH --gres=gpu:1"),
    "#!/bin/bash\n##SBATCH --nodes=9\n",
    "#!/bin/bash\n",
]
BAD = [
    # devices
    ("PT541", 4, script("--gres=gpu:8", "--gpus-per-node=4")),
    ("PT541", 4, script("--gpus=8", "--gpus-per-node=8")),
    ("PT541", 4, script("--gpus-per-node=8", "--gpus-per-task=1", "--ntasks=2", body="srun python train.py")),
    ("PT541", 3, script("--gpus-per-task=1", body="srun python train.py")),
    ("PT541", 3, script("--gpus-per-task=8", "--ntasks=2")),
    ("PT541", 3, script("--gpu-bind=closest")),
    ("PT541", 4, script(body=f"srun --gpu-bind=closest {TORCHRUN}")),
    ("PT541", 4, script(body="srun --gpus-per-task 1 python -m partool_runtime.agent plan.json")),
    # memory
    ("PT542", 4, script("--mem=0", "--mem-per-cpu=4G")),
    ("PT542", 4, script("--mem-per-gpu=10G", "--mem=0")),
    # header
    ("PT543", 5, script(body=f"module load cuda\n#SBATCH --time=10\nsrun {TORCHRUN}")),
    ("PT543", 3, script("--job-name=$NAME")),
    ("PT543", 2, script(nodes="--nodes=${NODES:-2}")),
    ("PT543", 3, script("--time=`cat time`")),
    ("PT543", 3, script("--nodes=3")),
    ("PT543", 3, script("--container-image=nvcr.io#nvidia/pytorch")),
    ("PT543", 3, script("--no-container-mount-home")),
    ("PT543", 2, "#!/bin/bash\n #SBATCH --nodes=2\nsrun hostname\n"),
    ("PT543", 2, "#!/bin/bash\n# SBATCH --nodes=2\nsrun hostname\n"),
    # not a script
    ("PT544", 2, "#!/bin/bash\n#SBATCH --nodes=2\r\nsrun hostname\r\n"),
    ("PT544", 1, "#SBATCH --nodes=2\nsrun hostname\n"),
    # nodes and tasks
    ("PT545", 3, script("--ntasks=1", nodes="--nodes=4", body="srun hostname")),
    ("PT545", 2, script(nodes="-N 4 -n1", body="srun hostname")),
    ("PT545", 3, script("--ntasks-per-node=1", nodes="--nodes=1-4", body="srun hostname")),
    ("PT545", 2, script(nodes="--nodes=2 --ntasks-per-node=8")),
    ("PT545", 4, script(body=f"srun --ntasks-per-node=8 {TORCHRUN}")),
    ("PT545", 4, script(body=TORCHRUN)),
    ("PT545", 4, script(body="accelerate launch --num_machines 2 train.py")),
    ("PT545", 5, script(body=f'LAUNCHER="{TORCHRUN}"\n$LAUNCHER')),
    # signals
    ("PT546", 3, script("--signal=B:USR1@300")),
    ("PT546", 3, script("--signal=SIGUSR1")),
    ("PT546", 4, script(body=f"trap 'scontrol requeue $(cat job)' USR2\nsrun {TORCHRUN}")),
    ("PT546", 4, script(body=f"trap 'kill -TERM $child' USR2\nsrun {TORCHRUN} &\nchild=$!\nwait")),
    ("PT546", 4, script(body=f'trap "kill \\$child" USR2\nsrun {TORCHRUN} &\nchild=$!\nwait')),
    # rendezvous
    ("PT547", 4, script(body=f"head=$(scontrol show hostnames | head -n1 || echo localhost)\nsrun {TORCHRUN}")),
    ("PT547", 4, script(body=f'head=$(first || echo "127.0.0.1")\nsrun {TORCHRUN}')),
    ("PT547", 4, script(body=f"head=$(srun -N1 -w $first hostname --ip-address)\nsrun {TORCHRUN}")),
    ("PT547", 4, script(body=f"head=$(hostname -I)\nsrun {TORCHRUN}")),
    ("PT547", 4, script(body=f"head=$SLURM_LAUNCH_NODE_IPADDR\nsrun {TORCHRUN}")),
    ("PT547", 4, script(body="srun torchrun --nnodes=2 --node-rank=$SLURM_NODEID train.py")),
    ("PT547", 4, script(body='srun bash -c "torchrun --nnodes=2 --node-rank=${SLURM_PROCID} train.py"')),
    ("PT547", 5, script(body="srun torchrun --nnodes=2 \\\n  --node-rank=$SLURM_NODEID train.py")),
    ("PT547", 4, script(body="srun torchrun --nproc-per-node=8 train.py")),
    ("PT547", 4, script(body="srun torchrun --nnodes=2 --standalone train.py")),
    # cores
    ("PT548", 5, script("--cpus-per-task=64")),
]


@pytest.mark.parametrize("text", GOOD)
def test_sound_scripts(text: str) -> None:
    assert lint(text) == []


@pytest.mark.parametrize(("code", "line", "text"), BAD)
def test_unsound_scripts(code: str, line: int, text: str) -> None:
    found = lint(text, "mine.sbatch")
    assert [(finding.code, finding.span and finding.span.line) for finding in found] == [(code, line)]
    assert found[0].span is not None
    assert found[0].span.file == "mine.sbatch"
    assert found[0].help


def test_every_rule_of_the_table_is_tried() -> None:
    scripts = [slurm_lint.parse(text) for _, _, text in BAD]
    idle = [rule.__name__ for rule in slurm_lint.RULES if not any(list(rule(script)) for script in scripts)]
    assert idle == []


@pytest.mark.parametrize("code", [f"PT54{digit}" for digit in range(1, 9)])
def test_examples_of_the_documentation(code: str) -> None:
    def whole(text: str) -> str:
        shebang = "" if code == "PT544" else "#!/bin/bash\n"
        nodes = "#SBATCH --nodes=2\n" if code == "PT547" else ""
        return f"{shebang}{nodes}{text}\n"

    assert code in {finding.code for finding in lint(whole(TEXTS[code].bad))}
    assert lint(whole(TEXTS[code].good)) == []


@pytest.mark.parametrize("text", ["", "\n", "#", "'", "#!/bin/bash\n<<END", "\\", "#SBATCH '", "#SBATCH -", "srun '\\"])
def test_anything_can_be_read(text: str) -> None:
    assert all(finding.code == "PT544" for finding in lint(text))
