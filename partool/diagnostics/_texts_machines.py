"""Rules about the machines of a launch, such as a start on fewer nodes or a container image (530-535)."""

from __future__ import annotations

from partool.diagnostics.record import BASE, Rule

_NODES = BASE.replace("accelerator: cpu", "accelerator: cpu, nodes: 2")
_SUPERCHIP = BASE.replace("accelerator: cpu", "accelerator: gh200-96")
_INSTINCT = BASE.replace("accelerator: cpu", "accelerator: mi300x")
RULES: tuple[Rule, ...] = (
    Rule(
        "PT530",
        "The run cannot go on with fewer nodes",
        "With fewer nodes only data parallelism changes, and a step keeps its sequences; all other degrees need their "
        "ranks, the batch has to divide, and each rank still has to fit into memory.",
        _NODES + "launch: {target: slurm, min_nodes: 1}\nparallel: {tensor: 2}\n",
        _NODES + "launch: {target: slurm, min_nodes: 1}\nparallel: {tensor: 1}\n",
    ),
    Rule(
        "PT531",
        "Some numbers of nodes have no plan",
        "Where the global batch does not divide by the ranks, or memory is short, some of the nodes stay idle.",
        _NODES.replace("nodes: 2", "nodes: 4") + "launch: {target: slurm, min_nodes: 2}\n",
        _NODES.replace("nodes: 2", "nodes: 4")
        + "training: {global_batch: 252}\nlaunch: {target: slurm, min_nodes: 2}\n",
    ),
    Rule(
        "PT533",
        "An image for another kind of processor",
        "GH200, GB200 and GB300 have arm64 processors, on which images for x86-64 end with 'exec format error'.",
        _SUPERCHIP + "launch: {target: k8s, image: 'registry.example/train:1-amd64', k8s: {storage: 'pvc:runs'}}\n",
        _SUPERCHIP + "launch: {target: k8s, image: 'registry.example/train:1-arm64', k8s: {storage: 'pvc:runs'}}\n",
    ),
    Rule(
        "PT534",
        "An image for another vendor's devices",
        "PyTorch is built for CUDA or for ROCm; an image built for one finds no devices of the other.",
        _INSTINCT + "launch: {target: slurm, image: 'nvcr.io/nvidia/pytorch:25.01-py3', slurm: {container: pyxis}}\n",
        _INSTINCT + "launch: {target: slurm, image: 'rocm/pytorch:latest', slurm: {container: pyxis}}\n",
    ),
)
