"""Ranks of test_tensor_hf.py: the host memory that loading a tensor rank's part of a model takes."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import torch
from _hf_models import plan_of
from _plans import small_plan
from _ranks import in_group

from partool.plan.layout import Mesh
from partool.spec.model import Weights
from partool_runtime.hf.building import build_causal
from partool_runtime.mesh import build_ranks
from partool_runtime.preparation import prepare
from partool_runtime.weights import fill, post_load

SLACK_BYTES = 4 * 2**20
"""Allowance for the allocator and for threads."""


def held_bytes() -> int:
    """Return the memory of this process that no file stands for."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Peak:
    """The most memory held while it is entered, looked at every millisecond."""

    def __enter__(self) -> Peak:
        self.start_bytes = self.peak_bytes = held_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self.peak_bytes = max(self.peak_bytes, held_bytes())

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


def write(folder: Path) -> None:
    """A Llama of 170 MB in eight files."""
    import transformers
    from safetensors.torch import save_file

    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1400, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=4,
        vocab_size=24000, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    config.save_pretrained(folder)
    names = {name: tuple(p.shape) for name, p in build_causal(folder).named_parameters()}
    files = [list(names)[start::8] for start in range(8)]
    index = {}
    for number, part in enumerate(files):
        file = f"model-{number + 1:05d}-of-00008.safetensors"
        save_file({name: torch.full(names[name], 0.01) for name in part}, folder / file)
        index.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def check(folder: Path) -> None:
    """Load a rank's part and look at the memory."""
    with in_group():
        base = small_plan(Path("unused"), ranks=2)
        plan = plan_of(base, folder, Mesh(tp=2))
        with Peak() as peak:
            prepared = prepare(plan, build_ranks(plan, torch.device("cpu")), lambda done, sent: None)
            fill(prepared.model, Weights(source="hf", path=str(folder)), seed=0)
            post_load(prepared.model)
        shard_bytes = sum(p.numel() * p.element_size() for p in prepared.model.parameters())
        largest_bytes = max(4 * shape[0] * shape[-1] for shape in prepared.model.whole_shapes().values())
        taken, bound = peak.peak_bytes - peak.start_bytes, 1.2 * shard_bytes + largest_bytes + SLACK_BYTES
        print(f"part {shard_bytes / 2**20:.1f} MiB, largest {largest_bytes / 2**20:.1f}, peak {taken / 2**20:.1f}")
        assert taken > 0.9 * shard_bytes, "what is measured must be the memory of the weights"
        assert taken <= bound, (taken, bound)
