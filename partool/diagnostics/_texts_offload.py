"""Rules about state in host memory and on disks: of plans (PT473 to PT497) and of runs (PT660 to PT676)."""

from __future__ import annotations

from partool.diagnostics.record import Rule, command_rule

_SMALL = (
    "model: {layers: 2, hidden: 256, heads: 4, vocab: 8192}\n"
    "hardware: {accelerator: h100-sxm, per_node: 1}\ndata: python-stdlib\n"
)


def _one_gpu(offload: str) -> str:
    return f"{_SMALL}parallel: {{offload: {{{offload}}}}}\n"


RULES: tuple[Rule, ...] = (
    Rule(
        "PT473",
        "Too little pinned memory",
        "Devices copy to and from pinned memory. It holds a step's gradients until their norm is known, a bucket of "
        "weights that is written and one that is sent. All of it is allocated before the first step.",
        _one_gpu("optimizer: cpu, gpu_fraction: 0, pinned_gib: 0.001"),
        _one_gpu("optimizer: cpu, gpu_fraction: 0, pinned_gib: 4"),
    ),
    Rule(
        "PT474",
        "More cores for the update than a rank has",
        "The ranks of a node share its cores, and each rank needs some of its own for training.",
        _one_gpu("optimizer: cpu, threads: 4096"),
        _one_gpu("optimizer: cpu, threads: 2"),
    ),
    Rule(
        "PT478",
        "The whole state is in memory although it is kept in files",
        "While one bucket is updated, one is read and one is written. Where these three are the whole state, files "
        "save no memory.",
        _one_gpu("optimizer: nvme, dir: /nvme, bucket_mib: 4096"),
        _one_gpu("optimizer: nvme, dir: /nvme"),
    ),
    Rule(
        "PT487",
        "A disk too small for the optimizer's state",
        "The state takes 12 bytes per parameter, 8 with moments: bf16; all ranks of a node write to the same disk.",
        "partool plan llama3-70b.yaml --set 'parallel.offload={optimizer: nvme, dir: /tmp}'",
        "partool plan llama3-70b.yaml --set 'parallel.offload={optimizer: nvme, dir: /mnt/nvme}'",
        "command",
    ),
    Rule(
        "PT488",
        "undo_gib is smaller than one bucket",
        "With speculate: undo, a bucket's masters and moments are copied before the update changes them. Buckets whose "
        "copies do not fit wait until the norm is known.",
        _one_gpu("optimizer: cpu, speculate: undo, undo_gib: 0.0001"),
        _one_gpu("optimizer: cpu, speculate: undo, undo_gib: 4"),
    ),
    Rule(
        "PT494",
        "An offloaded optimizer whose state all stays on the device",
        "gpu_fraction is the share of the state that stays on the device.",
        _one_gpu("optimizer: cpu, gpu_fraction: 1.0"),
        _one_gpu("optimizer: cpu, gpu_fraction: 0.5"),
    ),
    Rule(
        "PT497",
        "Offload settings without effect, as the optimizer stays",
        "With optimizer: auto the planner keeps the state on the device where that is faster, and these fields then "
        "have no effect.",
        _one_gpu("gpu_fraction: 0.5"),
        _one_gpu("optimizer: cpu, gpu_fraction: 0.5"),
    ),
    command_rule(
        "PT660",
        "Pinned memory does not hold a step's gradients",
        "All gradients of a step are kept in pinned host memory until their norm is known; the device writes them "
        "there.",
        "parallel: {offload: {optimizer: cpu, pinned_gib: 4}}   # 7 billion parameters on one rank",
        "parallel: {offload: {optimizer: cpu, pinned_gib: 16}}",
    ),
    command_rule(
        "PT664",
        "The optimizer is in host memory, and weights move between ranks",
        "Schedules that send weights round (WeiPipe) have no rank whose host memory could keep a parameter's state.",
        "parallel: {offload: {optimizer: cpu}, pipeline: {stages: 4, schedule: weipipe}}   # a plan changed by hand",
        "parallel: {offload: {optimizer: cpu}, pipeline: {stages: 4, schedule: 1f1b}}",
    ),
    command_rule(
        "PT667",
        "The folder for state on disks does not exist",
        "partool does not create it: if the disk is not mounted, the files would fill the disk under the mount point.",
        "parallel: {offload: {optimizer: nvme, dir: /nvme}}   # a machine without /nvme",
        "mkdir -p /data/nvme && partool launch mine.yaml   # parallel: {offload: {optimizer: nvme, dir: /data/nvme}}",
    ),
    command_rule(
        "PT668",
        "The folder for state on disks cannot be written",
        "Every rank keeps its part of the state in a file there.",
        "mount -o ro /dev/nvme0n1 /nvme && partool launch mine.yaml",
        "mount -o rw /dev/nvme0n1 /nvme && partool launch mine.yaml",
    ),
    command_rule(
        "PT669",
        "The disk has no room for the state",
        "The space is allocated before training begins, so that it cannot run out later.",
        "parallel: {offload: {optimizer: nvme, dir: /small}}   # 96 GB of masters and moments, 50 GB free",
        "parallel: {offload: {optimizer: nvme, dir: /large}}",
    ),
    command_rule(
        "PT670",
        "The disk with the state became full or read-only",
        "State could not be written, so the run ends; checkpoints are untouched.",
        "chattr +i, a quota, or a remount of /nvme while a run uses it",
        "partool launch mine.yaml --resume   # once the folder can be written to again",
    ),
    command_rule(
        "PT671",
        "The disk with the state fails",
        "A transfer ended with an I/O error; the run does not go on with numbers that may be wrong.",
        "parallel: {offload: {optimizer: nvme, dir: /nvme}}   # a drive that dmesg complains about",
        "partool launch mine.yaml --resume   # dir: on another drive",
    ),
    command_rule(
        "PT672",
        "A file of state is shorter than what was written to it",
        "The file was truncated, or the disk lost a part of it.",
        "truncate -s 1G /proc/PID/fd/N   # of a run",
        "partool launch mine.yaml --resume   # the state comes from the last checkpoint",
    ),
    command_rule(
        "PT673",
        "State that was read from a disk is not what was written",
        "Every block's checksum is kept in memory and compared after reading; a bit has flipped, or a write was lost.",
        "parallel: {offload: {optimizer: nvme, dir: /nvme}}   # a drive that corrupts data",
        "partool launch mine.yaml --resume   # dir: on another drive; the state comes from the last checkpoint",
    ),
    command_rule(
        "PT674",
        "Host memory is too small for the buckets of state on disks",
        "parallel.offload.buffers buckets are in memory at once, each with masters and moments.",
        "parallel: {offload: {optimizer: nvme, dir: /nvme, buffers: 64, bucket_mib: 4096}}",
        "parallel: {offload: {optimizer: nvme, dir: /nvme, buffers: 3, bucket_mib: 32}}",
    ),
    command_rule(
        "PT675",
        "Copies need more pinned host memory than is allowed",
        "parallel.offload.pinned_gib limits a rank's pinned memory for copies to and from its device.",
        "parallel: {offload: {activations: cpu, pinned_gib: 0.5}}   # layers save 3 GiB a rank",
        "parallel: {offload: {activations: cpu, pinned_gib: 4}}",
    ),
    command_rule(
        "PT676",
        "The system refuses more pinned host memory",
        "Pinned memory cannot be swapped out; containers and `ulimit -l` limit it.",
        "docker run --memory 16g --ulimit memlock=65536 ...   # parallel: {offload: {optimizer: cpu}} of 20 GiB",
        "docker run --memory 64g --ulimit memlock=-1 ...",
    ),
)
