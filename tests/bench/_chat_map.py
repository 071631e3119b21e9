"""The other side of ``chat_encoding.py``: transformers' ``apply_chat_template`` in ``datasets.map``.

``python _chat_map.py PEERS TOKENIZER CONVERSATIONS PROCESSES RESULT`` prints seconds of the map, and writes the sums of
ids and of masks, which the two sides have to agree on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(peers: str, tokenizer: str, conversations: str, processes: str, result: str) -> None:
    """Encode a file of conversations and write what came out."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", HF_DATASETS_OFFLINE="1")
    sys.path.append(peers)  # last, so that packages shared with partool keep partool's versions
    import datasets
    from chat_encoding import cpu_seconds
    from transformers import PreTrainedTokenizerFast

    datasets.disable_progress_bars()
    datasets.disable_caching()
    fast = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    rows = [json.loads(line) for line in Path(conversations).read_text(encoding="utf-8").splitlines()]
    data = datasets.Dataset.from_list(rows)

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        encoded = fast.apply_chat_template(row["messages"], return_assistant_tokens_mask=True, return_dict=True)
        return {"input_ids": encoded["input_ids"], "assistant_masks": encoded["assistant_masks"]}

    before, cpu_before = time.perf_counter(), cpu_seconds()
    mapped = data.map(encode, num_proc=int(processes), remove_columns=["messages"])
    seconds, cpu_s = time.perf_counter() - before, cpu_seconds() - cpu_before
    ids, masks = mapped["input_ids"], mapped["assistant_masks"]
    sums = [sum(map(len, ids)), sum(map(sum, ids)), sum(map(sum, masks))]
    versions = {"datasets": datasets.__version__}
    Path(result).write_text(
        json.dumps({"seconds": seconds, "cpu_s": cpu_s, "sums": sums, "versions": versions}), encoding="utf-8"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
