"""Rules of the ``launch`` section and of jobs in general (520-539, 580-599)."""

from __future__ import annotations

from partool.diagnostics.record import BASE, Rule, command_rule

RULES: tuple[Rule, ...] = (
    Rule(
        "PT520",
        "A secret is written out",
        "The spec, the plan, manifests and the run's folder are kept and shown to others, with any secret in them.",
        BASE + "launch: {env: {HF_TOKEN: hf_abcdefgh}}\n",
        BASE + "launch: {secrets: {HF_TOKEN: {file: /home/me/.hf-token}}}\n",
    ),
    Rule(
        "PT249",
        "A notification with no receiver, or with several",
        "The agent of the first node runs one command, or posts to one address.",
        BASE + "launch: {notify: {on: [failure]}}\n",
        BASE + "launch: {notify: {webhook_env: SLACK_URL, on: [failure]}}\n",
    ),
    Rule(
        "PT521",
        "A secret that the target cannot find",
        "On Kubernetes secrets come from Secret objects (secretKeyRef), elsewhere from files that the nodes can read.",
        BASE + "launch: {secrets: {HF_TOKEN: {secret: hub, key: token}}}\n",
        BASE + "launch: {secrets: {HF_TOKEN: {file: /home/me/.hf-token}}}\n",
    ),
    Rule(
        "PT522",
        "Environment variables that contradict each other or the machines",
        "A variable has one value. HIP_VISIBLE_DEVICES counts within the devices that ROCR_VISIBLE_DEVICES leaves. "
        "Network presets are for NCCL and RCCL, whose LL128 protocol has corrupted data on GH200 with Slingshot "
        "(NVIDIA/nccl #2001).",
        BASE + "launch: {env: {HIP_VISIBLE_DEVICES: '0,1', ROCR_VISIBLE_DEVICES: '0,1'}}\n",
        BASE + "launch: {env: {HIP_VISIBLE_DEVICES: '0,1'}}\n",
    ),
    Rule(
        "PT523",
        "Image and container do not go together",
        "An image needs a runtime that starts it, and pods and containers need an image; deploy/ has Dockerfiles.",
        BASE + "launch: {target: k8s}\n",
        BASE + "launch: {target: k8s, image: 'registry.example/train:1', k8s: {storage: 'pvc:runs'}}\n",
    ),
    Rule(
        "PT524",
        "The target cannot do what the section asks",
        "Only a scheduler can start several nodes, restart all of them, or go on with fewer.",
        BASE + "launch: {target: torchrun, min_nodes: 1}\n",
        BASE + "launch: {target: slurm, min_nodes: 1}\n",
    ),
    Rule(
        "PT525",
        "An sbatch option that partool writes itself",
        "Slurm accepts an option twice, and even --gres beside --gpus-per-node, and silently takes one of them.",
        BASE + "launch: {target: slurm, slurm: {options: {gres: 'gpu:8'}}}\n",
        BASE + "launch: {target: slurm, slurm: {gpus: gres, options: {licenses: 'scratch:1'}}}\n",
    ),
    Rule(
        "PT526",
        "A mount that is not possible, or that hides a folder",
        "Only containers have mounts; each needs its own place inside, and partool's own folders must stay visible.",
        BASE + "launch: {mounts: [{source: /data, target: /data}]}\n",
        BASE + "launch: {target: slurm, image: 'registry.example/train:1', slurm: {container: pyxis},\n"
        "  mounts: [{source: /data, target: /data}]}\n",
    ),
    Rule(
        "PT527",
        "Time limits that cut training or checkpoints off",
        "Before its limit a job gets a signal, and needs time to write a checkpoint; then it goes back to the queue. "
        "Without a limit or a partition the cluster's defaults decide when that is.",
        BASE + "launch: {target: slurm, shutdown_timeout_s: 120, slurm: {signal_lead_s: 60}}\n",
        BASE + "launch: {target: slurm, shutdown_timeout_s: 120, slurm: {time: '4:00:00', partition: cpu}}\n",
    ),
    Rule(
        "PT528",
        "Pods with settings that fail, or that risk losing data",
        "Shared memory counts against a container's memory, and files written in a pod are lost with it; some fields "
        "belong to one kind of object, and some labels are written by partool.",
        BASE + "launch: {target: k8s, image: 'registry.example/train:1', k8s: {memory: 8Gi, shared_memory: 16Gi}}\n",
        BASE + "launch: {target: k8s, image: 'registry.example/train:1', k8s: {memory: 64Gi, storage: 'pvc:runs'}}\n",
    ),
    Rule(
        "PT529",
        "A file of the launch section that cannot be found or used",
        "Paths start from the spec's folder, or are absolute where ranks read them; a site profile names no other one.",
        BASE + "launch: {python: venv/bin/python}\n",
        BASE + "launch: {python: /opt/venv/bin/python}\n",
    ),
    command_rule(
        "PT580",
        "The plan is not the one that the command names",
        "A command names its plan by hash, and the nodes of a run compare theirs: two plans would train two models.",
        "python -m partool_runtime.agent plan.json ... --plan-hash 3f2a...   # plan.json was made again since",
        "partool render mine.yaml --target torchrun   # plan.json and the commands that belong to it",
    ),
    command_rule(
        "PT581",
        "The agent's options for several nodes do not add up",
        "--nodes, --node-rank and --rendezvous belong together. A variable that is empty or was not expanded is never "
        "read as 0, as every node would then take itself for the first.",
        "srun python -m partool_runtime.agent plan.json --node-rank $SLURM_NODEID ...   # expanded before srun",
        "srun bash -c 'exec python -m partool_runtime.agent plan.json --node-rank \"$SLURM_NODEID\" ...'",
    ),
    command_rule(
        "PT582",
        "The number of nodes is not the plan's",
        "The plan fixes how many nodes and ranks there are; the agent starts the ranks of one node.",
        "python -m partool_runtime.agent plan.json --run-dir run   # plan for 2 nodes",
        "python -m partool_runtime.agent plan.json --run-dir run --nodes 2 --node-rank 0 --rendezvous node-0:29500",
    ),
    command_rule(
        "PT583",
        "An agent that does not belong to the run",
        "Each agent has a node number of its own, and each run has a rendezvous address of its own.",
        "python -m partool_runtime.agent plan.json ... --node-rank 0   # on every node",
        "python -m partool_runtime.agent plan.json ... --node-rank 1   # on the second",
    ),
    command_rule(
        "PT584",
        "A secret cannot be read where the ranks start",
        "launch.secrets names files that every node can read, or Kubernetes Secrets; partool never shows the content. "
        "The agents of several nodes also need a key: agents.key in the run's folder, or PARTOOL_AGENT_KEY.",
        "launch: {secrets: {HF_TOKEN: {file: /home/me/.hf-token}}}   # not on the node, or not readable there",
        "launch: {secrets: {HF_TOKEN: {file: /shared/home/me/.hf-token}}}",
    ),
    command_rule(
        "PT585",
        "The same plan is already queued or running",
        "A repeated submission, after a lost connection for example, must not train the same plan twice.",
        "partool launch mine.yaml --target slurm   # while the first one waits in the queue",
        "partool status; partool launch mine.yaml --target slurm --again",
    ),
    command_rule(
        "PT586",
        "A record of a run cannot be read",
        "A file in the run's folder is not as partool writes it; the message names the file, the line of a "
        "log, and the field. submission.json holds the scheduler's name for the run, and nothing can be queried "
        "without it; summary.json and events are what reports show.",
        "edit .partool/runs/mine-1a2b3c4d/submission.json",
        "restore the file; of a lost submission, the job has the run's id as its name",
    ),
    command_rule(
        "PT587",
        "These plans cannot be the tasks of one array",
        "All tasks of a Slurm array request the same machines; other targets have no arrays.",
        "partool launch mine.yaml --target slurm --array hardware.nodes=1,2",
        "partool launch mine.yaml --target slurm --array training.seed=1,2",
    ),
    command_rule(
        "PT588",
        "The nodes are started by hand",
        "For the target torchrun partool prints one command per node; no scheduler takes them.",
        "partool launch mine.yaml --set launch.target=torchrun",
        "partool render mine.yaml --target torchrun",
    ),
    command_rule(
        "PT589",
        "Checkpoints on the cluster cannot be renamed from here",
        "--step renames the checkpoints after that step; a Kubernetes volume is not mounted on this machine.",
        "partool launch --resume mine-1a2b3c4d --step 500   # a run on Kubernetes",
        "rename the later checkpoint folders in the volume, then launch --resume without --step",
    ),
)
