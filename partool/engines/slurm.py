"""Reads the directives of Slurm in a batch script (https://slurm.schedmd.com/sbatch.html)."""

from __future__ import annotations

import re

_OPTION = re.compile(r"--(nodes|ntasks-per-node|gpus-per-node|gres)[= ](?:gpu:)?(?:[a-z]\w*:)?(\d+)")
_VARIABLES = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE",),
}


def _directives(text: str) -> dict[str, int]:
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    return {match[1]: int(match[2]) for line in lines for match in _OPTION.finditer(line)}


def variables(text: str) -> dict[str, str]:
    """Return the variables that Slurm sets for a batch script, as far as its directives say them."""
    return {each: str(number) for name, number in _directives(text).items() for each in _VARIABLES.get(name, ())}


def hardware(text: str) -> dict[str, int]:
    """Return the machines of a batch script whose command starts one process per device without a launcher."""
    found = _directives(text)
    ranks = found.get("ntasks-per-node", 1)
    ranks = ranks if ranks > 1 else found.get("gpus-per-node", found.get("gres", 0))
    return {"nodes": found["nodes"], "per_node": ranks} if "nodes" in found and ranks else {}
