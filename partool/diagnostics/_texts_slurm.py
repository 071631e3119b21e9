"""Rules about Slurm jobs (PT541 to PT554)."""

from __future__ import annotations

from partool.diagnostics.record import Rule, command_rule

RULES: tuple[Rule, ...] = (
    command_rule(
        "PT541",
        "A batch script asks for devices in ways that clash",
        "Slurm silently accepts --gres=gpu:8 together with --gpus-per-node=4. A binding of devices to the one task per "
        "node hides them from the ranks that the task starts.",
        "#SBATCH --gres=gpu:8\n#SBATCH --gpus-per-node=4",
        "#SBATCH --gpus-per-node=8",
    ),
    command_rule(
        "PT542",
        "A batch script asks for memory in two ways",
        "--mem, --mem-per-cpu and --mem-per-gpu exclude each other.",
        "#SBATCH --mem=0\n#SBATCH --mem-per-cpu=4G",
        "#SBATCH --mem=0",
    ),
    command_rule(
        "PT543",
        "The header of a batch script is not read as intended",
        "Slurm reads #SBATCH lines up to the first command; the shell never does, so variables in them are not "
        "expanded. Of an option that is given twice the last one counts. Container options start the batch script "
        "itself in the container.",
        "NODES=4\n#SBATCH --nodes=$NODES",
        "#SBATCH --nodes=4",
    ),
    command_rule(
        "PT544",
        "sbatch does not accept the script",
        "sbatch refuses scripts without an interpreter line (#!), and scripts with DOS line ends.",
        "#SBATCH --nodes=2\nsrun train.sh",
        "#!/bin/bash\n#SBATCH --nodes=2\nsrun train.sh",
    ),
    command_rule(
        "PT545",
        "Nodes, tasks and launchers do not add up",
        "srun starts one launcher on each node, which starts the ranks. With fewer tasks than nodes, or with tasks per "
        "node and a range of nodes, Slurm silently gives fewer nodes.",
        "#SBATCH --nodes=4 --ntasks=1\ntorchrun --nnodes=4 --nproc-per-node=8 train.py",
        "#SBATCH --nodes=4 --ntasks-per-node=1\nsrun torchrun --nnodes=4 --nproc-per-node=8 train.py",
    ),
    command_rule(
        "PT546",
        "A signal that does not end in a checkpoint",
        "NCCL may catch USR1 and torchrun dies of it; srun kills its tasks on TERM but forwards USR2; a command "
        "substitution in a trap aborts bash 5.2 when two signals arrive together.",
        "#SBATCH --signal=B:USR1@300\ntrap 'kill -TERM $child' USR1\nsrun train.sh & child=$!",
        "#SBATCH --signal=B:USR2@300\ntrap 'kill -USR2 $child' USR2\nsrun train.sh & child=$!",
    ),
    command_rule(
        "PT547",
        "Nodes that may not find each other",
        "With a fallback to localhost, a rank that is expanded before srun, or a torchrun without the number of nodes, "
        "each node trains alone, and the job still ends successfully.",
        "srun torchrun --nnodes=2 --node-rank=$SLURM_NODEID train.py",
        "srun bash -c 'torchrun --nnodes=2 --node-rank=$SLURM_NODEID train.py'",
    ),
    command_rule(
        "PT548",
        "A step with one core per task",
        "Since Slurm 22.05 srun does not inherit --cpus-per-task from the job: without the option eight ranks share a "
        "core.",
        "#SBATCH --cpus-per-task=64\nsrun torchrun --nproc-per-node=8 train.py",
        '#SBATCH --cpus-per-task=64\nsrun --cpus-per-task="$SLURM_CPUS_PER_TASK" torchrun --nproc-per-node=8 train.py',
    ),
    command_rule(
        "PT549",
        "A name or path that cannot be passed to a target",
        "The header of a batch script cannot quote everything, mounts are separated by colons and commas, and names of "
        "runs and of environment variables cannot be quoted at all.",
        "PARTOOL_HOME='/data/my \"runs\"' partool launch --target slurm mine.yaml",
        "PARTOOL_HOME=/data/my-runs partool launch --target slurm mine.yaml",
    ),
    command_rule(
        "PT550",
        "Slurm cannot be queried",
        "Its commands are missing here, or its controller does not answer; running jobs go on.",
        "partool launch mine.yaml --target slurm   # on a laptop",
        "partool launch mine.yaml --target slurm   # on a login node; partool render works everywhere",
    ),
    command_rule(
        "PT551",
        "Slurm refuses the job",
        "The output of sbatch, or of sbatch --test-only, says what is missing or not allowed.",
        "partool launch mine.yaml --target slurm --set launch.slurm.partition=nope",
        "sinfo -s; partool launch mine.yaml --target slurm --set launch.slurm.partition=main",
    ),
    command_rule(
        "PT552",
        "It is not known whether a job was submitted",
        "sbatch gave no answer and Slurm cannot be queried for a job of the run's name; the job may still start.",
        "launch again at once",
        "once Slurm answers: scancel --name=<the run's id>, then launch again",
    ),
    command_rule(
        "PT553",
        "Slurm does not cancel the job",
        "scancel refused, most often because the job is another user's.",
        "partool cancel mine-1a2b3c4d   # submitted by somebody else",
        "ask its owner, or an administrator",
    ),
    command_rule(
        "PT554",
        "Other nodes probably cannot see the run's folder",
        "Plan, status, logs and checkpoints are in the run's folder; /tmp is a different folder on every node.",
        "PARTOOL_HOME=/tmp/partool partool launch mine.yaml --target slurm",
        "PARTOOL_HOME=/shared/me/partool partool launch mine.yaml --target slurm",
    ),
)
