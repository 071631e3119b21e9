"""The process that tokenises the data of a spec, or shows samples of them, for ``partool data``; needs no torch.

It reads one request as JSON from standard input and prints one JSON object per line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np

from partool.plan.packing import Arrangement, arrange
from partool.plan.token_cache import TOKENISED, cache_of, stretches
from partool.spec.data import DataSpec
from partool_runtime.errors import EXIT_CONFIGURATION, ConfigurationError
from partool_runtime.tokens.cache import TokenCache
from partool_runtime.tokens.conversations import ConversationSource
from partool_runtime.tokens.opening import files_of, source_of
from partool_runtime.tokens.shards import Shard

Event = dict[str, Any]


def answer(request: dict[str, Any]) -> Iterator[Event]:
    """Yield what a request asks for: ``prepare``, or ``show`` with the numbers of rows.

    Raises ConfigurationError for data that cannot be read or tokenised.
    """
    data = DataSpec.model_validate(request["data"])
    shown: list[tuple[ConversationSource, Arrangement]] = []
    names = list(data.named)
    for number, part in enumerate(data.every_part):
        trains = number < len(data.parts)
        place = number - len(data.every_part) + len(names)
        name = names[place] if place >= 0 else ""
        for files in stretches(files_of(part)):
            if files[0].format not in TOKENISED:
                yield {"event": "in place", "files": len(files), "set": name}
                continue
            cache = TokenCache(cache_of(files, part), source_of(files, part))
            with cache.lock(wait=True):
                cache.ensure()
            shard = cache.open()
            folder = str(cache.folder)
            about = {"folder": folder, "files": len(files), "trains": trains, "set": name}
            yield {"event": "cache", **about, **_counts(shard)}
            if request["action"] == "show" and trains:
                arranged = _arranged(shard, part, request["sequence_length"])
                shown.append((ConversationSource(files, part), arranged))
    first, of = 0, sum(arranged.train.count for _, arranged in shown)
    for source, arranged in shown:
        for event in _rows(source, arranged, [row - first for row in request["rows"]]):
            yield {**event, "row": event["row"] + first, "of": of}
        first += arranged.train.count


def _counts(shard: Shard) -> Event:
    trained = len(shard.tokens) if shard.loss is None else int(np.count_nonzero(shard.loss))
    return {"tokens": len(shard.tokens), "documents": len(shard.documents) - 1, "trained": trained,
            "empty": shard.left_out, "first_empty": shard.first_left_out,
            "masked": shard.masked, "first_masked": shard.first_masked, "notes": list(shard.notes)}  # fmt: skip


def _arranged(shard: Shard, data: DataSpec, sequence_length: int) -> Arrangement:
    return arrange(
        shard.lengths(),
        sequence_length,
        truncate=data.truncate,
        pack=data.pack,
        validation=data.validation,
        pairs=data.is_preference,
    )


def _rows(source: ConversationSource, arranged: Arrangement, numbers: list[int]) -> Iterator[Event]:
    rows = arranged.train
    wanted = [row for row in numbers if 0 <= row < rows.count]
    documents = {row: rows.documents[rows.starts[row] : rows.starts[row + 1]].tolist() for row in wanted}
    shown = source.texts({document for each in documents.values() for document in each})
    for row in wanted:
        parts = [_document(shown[document], document, arranged) for document in documents[row]]
        yield {"event": "row", "row": row, "room": arranged.room, "documents": parts}


def _document(shown: Any, document: int, arranged: Arrangement) -> Event:
    """Return a sample as runs of tokens of one message that are all trained on, or all not."""
    begin = int(arranged.begins[document])
    span = slice(begin, begin + int(arranged.kept[document]))
    ids, loss, messages = (array[span].tolist() for array in (shown.ids, shown.loss, shown.messages))
    runs = []
    for (message, trained), places in groupby(range(len(ids)), lambda place: (messages[place], loss[place])):
        here = list(places)
        text = shown.decode([ids[place] for place in here])
        role = shown.roles[message] if 0 <= message < len(shown.roles) else ""
        runs.append({"role": role, "trained": bool(trained), "tokens": len(here), "text": text})
    return {"origin": shown.origin, "tokens": len(ids), "cut": len(shown.ids) - len(ids), "runs": runs}


def main() -> int:
    """Answer the request on standard input."""
    sink = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not an answer
    request = json.load(sys.stdin)
    try:
        for event in answer(request):
            print(json.dumps(event), file=sink, flush=True)
    except ConfigurationError as error:
        print(
            json.dumps({"event": "error", "code": error.code, "message": error.message, "help": error.help}), file=sink
        )
        sink.flush()
        return EXIT_CONFIGURATION
    return 0


if __name__ == "__main__":
    sys.exit(main())
