"""Rules that are checked at launch (5xx) and at run time (6xx); the examples are for reading, not for planning."""

from __future__ import annotations

from partool.diagnostics.record import Rule


def _rule(code: str, title: str, reason: str, bad: str, good: str) -> Rule:
    return Rule(code, title, reason, bad, good, "command")


RULES: tuple[Rule, ...] = (
    _rule(
        "PT501",
        "The runtime's packages are not installed",
        "Planning needs no torch; training and export do.",
        "pip install partool && partool launch mine.yaml",
        "pip install 'partool[train]' && partool launch mine.yaml",
    ),
    _rule(
        "PT502",
        "No such run",
        "Runs are searched for in .partool/runs of the current folder, or in the folder PARTOOL_HOME.",
        "partool status quikstart",
        "partool list; partool status quickstart",
    ),
    _rule(
        "PT503",
        "The file is not a plan of this version",
        "A plan is read strictly: one of another version, or one that was edited, could mean something else.",
        "partool launch old-plan.json",
        "partool plan mine.yaml --out plan.json && partool launch plan.json",
    ),
    _rule(
        "PT504",
        "The run is in use",
        "Two agents that write into one run's folder would damage its checkpoints.",
        "partool launch --resume last   # while it is running",
        "partool cancel last && partool launch --resume last",
    ),
    _rule(
        "PT505",
        "The runtime cannot run this plan yet",
        "Some layouts can be planned and priced before the runtime can execute them; rule codes name the parts.",
        "partool launch mixtral.yaml",
        "partool plan mixtral.yaml   # names the part, and what can run",
    ),
    _rule(
        "PT506",
        "The plan contradicts itself",
        "A plan's mesh has as many ranks as its nodes have devices; one that was edited may not.",
        "partool launch plan.json   # devices.per_node was edited, the mesh was not",
        "partool plan mine.yaml --set hardware.per_node=4 --out plan.json && partool launch plan.json",
    ),
    _rule(
        "PT507",
        "The agent, or its ranks, did not start",
        "The agent's log says what stopped it; if the operating system refused to start ranks, it will refuse again.",
        "partool launch --detach mine.yaml",
        "partool logs last --errors",
    ),
    _rule(
        "PT508",
        "The run is not running",
        "Only a queued or running run can be cancelled.",
        "partool cancel last",
        "partool status last",
    ),
    _rule(
        "PT509",
        "The checkpoint to resume from does not exist",
        "--step must name a complete checkpoint of the run.",
        "partool launch --resume last --step 55",
        "partool launch --resume last",
    ),
    _rule(
        "PT510",
        "The number of ranks is not the plan's",
        "The plan fixes the number of ranks; the launcher started another.",
        "torchrun --nproc-per-node=3 -m partool_runtime.worker plan.json   # plan for 2 ranks",
        "partool launch plan.json",
    ),
    _rule(
        "PT511",
        "The native kernels are missing",
        "kernels.mode: native needs the compiled library, which is built where there is a C++ compiler.",
        "partool launch mine.yaml --set kernels.mode=native   # installed without a compiler",
        "partool launch mine.yaml --set kernels.mode=auto",
    ),
    _rule(
        "PT512",
        "The run's folder cannot be written",
        "Every run needs a folder for its plan, logs and checkpoints, under .partool or PARTOOL_HOME.",
        "partool launch mine.yaml   # in a folder that is read-only",
        "PARTOOL_HOME=~/partool partool launch mine.yaml",
    ),
    _rule(
        "PT513",
        "This machine lacks the plan's accelerators",
        "The plan needs accelerators; this machine has fewer, or its torch was built without support for them.",
        "partool launch specs/gpt2-xl.yaml   # on a machine without a GPU",
        "partool launch specs/quickstart.yaml",
    ),
    _rule(
        "PT514",
        "The run is on another machine",
        "A run's folder may be shared between machines; its process can be signalled only where it runs.",
        "partool cancel last   # started on another machine, seen through a shared folder",
        "ssh there partool cancel last",
    ),
    _rule(
        "PT515",
        "The run has no pipeline timeline of that step",
        "Pipeline ranks record their actions on log steps; a report needs a step that all ranks of a pipeline "
        "recorded.",
        "partool report last --step 7   # log_every: 10",
        "partool report last --step 10",
    ),
    _rule(
        "PT516",
        "This machine lacks what a dry run needs",
        "A dry run needs torch; for plans of GPUs it compiles a small library against it on its first use, and keeps "
        "it in a folder that only you can write to.",
        "python -m partool_runtime.dry plan.json 0   # without a C++ compiler",
        "apt install g++",
    ),
    _rule(
        "PT519",
        "This operating system runs no ranks",
        "Plans can be made and rendered anywhere; agents and ranks need processes, signals and locks of Linux.",
        "partool launch mine.yaml   # on Windows",
        "partool render mine.yaml --target slurm --out job",
    ),
    _rule(
        "PT540",
        "TensorBoard is not installed",
        "launch.tensorboard writes event files with the package tensorboard.",
        "partool launch mine.yaml --set launch.tensorboard=true",
        "pip install 'partool[tensorboard]'",
    ),
    _rule(
        "PT601",
        "The data source has no files",
        "The path, glob or folder holds no files; a warning where ranks run on a cluster, which may have them.",
        "data: {source: /data/tokns/*.bin}",
        "data: {source: /data/tokens/*.bin}",
    ),
    _rule(
        "PT602",
        "A data file is malformed",
        "A record that is silently skipped is lost data; the message names the file and the line.",
        '{"text": "no closing quote}',
        '{"text": "closed"}',
    ),
    _rule(
        "PT603",
        "The tokenizer cannot be used",
        "data.tokenizer is `bytes`, or a folder with a tokenizer.json.",
        "data: {tokenizer: gpt2}",
        "data: {tokenizer: /models/gpt2}",
    ),
    _rule(
        "PT604",
        "Too little data",
        "There must be enough tokens for at least one sequence, in training and in the held-out part.",
        "training: {sequence_length: 131072}   # on a short text",
        "training: {sequence_length: 1024}",
    ),
    _rule(
        "PT605",
        "A token is outside the vocabulary",
        "The embedding has one row for each token of the vocabulary.",
        "model: {vocab: 100}   # with the byte tokenizer",
        "model: {vocab: 256}",
    ),
    _rule(
        "PT693",
        "Documents hold no text",
        "A record with empty text gives no token to train on, so it is left out. Many of them can mean that the text "
        "is under another key.",
        'data: {source: a.jsonl}   # {"text": "", "body": "the text"}',
        "data: {source: a.jsonl, text_field: body}",
    ),
    _rule(
        "PT610",
        "There is no such checkpoint",
        "A run can be resumed, and weights can be read, from a complete checkpoint only.",
        "partool export last --step 55 --out hf",
        "partool export last --out hf",
    ),
    _rule(
        "PT611",
        "A checkpoint is damaged",
        "Its files do not match the sizes and checksums in its manifest. The error names an intact checkpoint.",
        "partool launch --resume last",
        "partool launch --resume last --step 200",
    ),
    _rule(
        "PT617",
        "A checkpoint has a version that this partool does not read",
        "The manifest of a checkpoint says the version of its form. A checkpoint of another version may be intact, so "
        "that resume.fallback does not skip it.",
        "partool launch --resume last   # after a newer partool has trained",
        "partool launch --resume last --step 200",
    ),
    _rule(
        "PT685",
        "A checkpoint holds more than tensors",
        "torch describes a checkpoint in .metadata, a pickle, which can name any function for its reader to call. "
        "partool reads it as data: a description that names anything outside a list of torch's own classes is refused, "
        "as is one whose tensors lie outside the checkpoint's files. Nothing in it has been run.",
        "partool export last --out model   # of a run whose .metadata names os.system",
        "partool launch --resume last --step 200",
    ),
    _rule(
        "PT612",
        "The checkpoint is of another model",
        "Names or shapes of the parameters differ.",
        "partool launch --resume last --set model.layers=6",
        "partool launch --resume last",
    ),
    _rule(
        "PT613",
        "The disk is full",
        "Nothing that was complete is lost: half-written files are removed.",
        "checkpoint: {dir: /small}",
        "checkpoint: {dir: /large}",
    ),
    _rule(
        "PT614",
        "A value cannot be saved",
        "Checkpoints hold tensors and plain JSON values.",
        "partool launch mine.yaml",
        "report it with the run's error file",
    ),
    _rule(
        "PT615",
        "Checkpoints cannot be written",
        "The folder cannot be created or written to.",
        "checkpoint: {dir: /read-only}",
        "checkpoint: {dir: /scratch/me}",
    ),
    _rule(
        "PT616",
        "The data is not what the checkpoint was trained on",
        "Going on would silently lose or repeat samples.",
        "partool launch --resume last --set training.seed=2",
        "partool launch --resume last",
    ),
    _rule(
        "PT679",
        "The checkpoint is of a run with another optimizer",
        "One optimizer's state beside the weights means nothing to another one. Learning rate, groups and other "
        "settings may change.",
        "partool launch --resume last --set optimizer.name=lion",
        "partool launch --resume last --set optimizer.lr=1e-4",
    ),
    _rule(
        "PT620",
        "The weights folder cannot be read",
        "It must hold a Hugging Face configuration and safetensors files, or a partool checkpoint.",
        "model: {weights: {source: hf, path: /models/empty}}",
        "model: {weights: {source: hf, path: /models/llama3-8b}}",
    ),
    _rule(
        "PT621",
        "The weights do not fit the model",
        "Names or shapes differ; the message lists them.",
        "model: {preset: llama3-8b, weights: {source: hf, path: /models/llama2-7b}}",
        "model: {config: /models/llama2-7b, weights: {source: hf, path: /models/llama2-7b}}",
    ),
    _rule(
        "PT622",
        "The weights are not finite",
        "A NaN or infinity in the weights spreads to everything in the first step.",
        "model: {weights: {source: hf, path: /models/broken}}",
        "model: {weights: {source: hf, path: /models/sound}}",
    ),
    _rule(
        "PT623",
        "A pattern of frozen parameters matches nothing, or everything",
        "A pattern that matches nothing is a misspelling; one that matches everything leaves nothing to train.",
        "model: {preset: gpt2, frozen: ['embedding.*']}",
        "model: {preset: gpt2, frozen: ['embed.*']}",
    ),
    _rule(
        "PT624",
        "No Hugging Face architecture expresses the model",
        "An export that another tool would read as a different model is refused.",
        "partool export last --out hf   # a model with ReLU and RoPE",
        "partool export last --out hf   # shaped like Llama, Mixtral, Qwen3, DeepSeek-V3, …",
    ),
    _rule(
        "PT625",
        "The export cannot be written",
        "An earlier export or another file is in the way.",
        "partool export last --out /models/mine",
        "partool export last --out /models/mine --force",
    ),
    _rule(
        "PT630",
        "Too many non-finite steps",
        "Each was skipped; so many in a row mean that training has diverged or the data is broken.",
        "optimizer: {lr: 10}",
        "optimizer: {lr: 3.0e-4}",
    ),
    _rule(
        "PT690",
        "The first step of a fresh model has no gradients",
        "A model with random weights guesses all V tokens alike, a loss of ln V, but its gradients are not zero: here "
        "something between tokens and layers multiplies by zero, or all parameters that could learn are frozen.",
        "model: {hf: ./mine}   # a config.json whose embedding multiplier is 0",
        "model: {hf: ./mine, weights: {source: hf}}   # the multiplier is 1, as in the published folder",
    ),
    _rule(
        "PT652",
        "Kernels differ from torch on this device",
        "Before training, fused kernels compute a few rows of the model's own widths, which are compared with torch; a "
        "compiler or a driver may be to blame.",
        "kernels: {mode: native}",
        "kernels: {mode: auto}   # what differs is left to torch, and the log says so",
    ),
    _rule(
        "PT647",
        "The device has no symmetric memory",
        "Fused products and exchanges need CUDA devices that reach each other's memory, and a torch that supports "
        "them.",
        "parallel: {tensor: {degree: 2, overlap: symmetric}}   # on CPUs",
        "parallel: {tensor: {degree: 2, overlap: backward}}",
    ),
    _rule(
        "PT648",
        "A sequence has another length than its shares were planned for",
        "With sequence_norms every tensor rank holds a share of training.sequence_length tokens.",
        "model(tokens of 512)   # training: {sequence_length: 1024}",
        "model(tokens of 1024)   # training: {sequence_length: 1024}",
    ),
    _rule(
        "PT650",
        "The plan's sequence parallelism is not supported",
        "The plan comes from another version, or was changed by hand.",
        "partool launch plan.json   # layout.sequence.degree: 2 beside pipeline.schedule: weipipe",
        "partool plan spec.yaml --out plan.json && partool launch plan.json",
    ),
    _rule(
        "PT651",
        "A sequence has another length than its ranks were planned for",
        "Ranks that share sequences hold tokens by their positions in training.sequence_length.",
        "batch of sequences of 512 tokens   # training: {sequence_length: 1024}",
        "batch of sequences of 1024 tokens   # training: {sequence_length: 1024}",
    ),
    _rule(
        "PT653",
        "Layers along rows or columns cannot exchange keys in a ring",
        "Rings, gathered keys and StarTrail order tokens in one line, and let each attend to the earlier ones.",
        "layout.sequence.method: ring   # a plan changed by hand, of a model with layer_types: [row, column]",
        "parallel: {sequence: {method: dsp, degree: 4}}",
    ),
    _rule(
        "PT658",
        "The device does not multiply in 8 bits",
        "Kernels are compiled for the 8-bit types of Hopper, Blackwell (B200), MI300X, MI325X and MI355X.",
        "training: {precision: fp8}   # hardware described by hand, or another device than planned",
        "training: {precision: bf16}",
    ),
    _rule(
        "PT657",
        "A layer has no feed-forward network that works on tiles",
        "A tile is a stretch of the sequence; only a network that maps every token by itself can take one at a time.",
        "parallel: {tiles: {mlp: 4096}}   # the plan of another model, or changed by hand",
        "parallel: {tiles: {mlp: 0}}",
    ),
    _rule(
        "PT556",
        "A rank makes no progress",
        "Ranks tell their agent when something is done. A rank that a signal has stopped, or that waits for what does "
        "not come, holds all others up. Before the agent ends the ranks, it writes what each thread was doing into "
        "errors/attempt-N in the run's folder: begin with the rank that the message names.",
        "kill -STOP 4711   # the process of a rank",
        "launch: {watchdog: off}   # while a debugger holds a rank",
    ),
    _rule(
        "PT659",
        "A damaged checkpoint is skipped",
        "A file of the newest checkpoint has another size or checksum than when it was written. A run that a scheduler "
        "or the agent starts again goes on from the newest intact checkpoint, and the damaged one is renamed and kept. "
        "A run that somebody resumes ends with PT611 instead, so that they can decide.",
        "resume: {fallback: true}   # and a disk that loses bytes",
        "resume: {fallback: false}   # no run goes on from an older checkpoint by itself",
    ),
    _rule(
        "PT656",
        "A sequence has another length than the model's grid",
        "Layers that attend along rows or columns take every token's position from the grid.",
        "model(tokens of 1024)   # attention: {grid: [16, 60], layer_types: [row, column]}",
        "model(tokens of 960)   # attention: {grid: [16, 60], layer_types: [row, column]}",
    ),
)
