"""The process that encodes samples for another one; it imports neither torch nor its parent's main module."""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path

from partool_runtime.chat._frames import EncodedChunk, read_frame, samples_from_json, write_frame
from partool_runtime.chat.encode import Encoder, EncoderSettings
from partool_runtime.errors import ConfigurationError


def settings_to_json(settings: EncoderSettings) -> bytes:
    """Return settings as JSON."""
    template = None if settings.template is None else str(settings.template)
    return json.dumps([str(settings.folder), template, settings.loss, settings.date.isoformat()]).encode()


def serve() -> None:
    """EncodedChunk frames of samples from standard input on standard output until the input ends.

    The first frame holds the encoder's settings. What libraries print goes to standard error.
    """
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    folder, template, loss, date = json.loads(read_frame(source)[0])
    file = None if template is None else Path(template)
    encoder = Encoder(Path(folder), file, loss, date=datetime.date.fromisoformat(date))
    while parts := read_frame(source):
        try:
            answer = EncodedChunk(encoder.encode(samples_from_json(parts[0])))
        except ConfigurationError as error:
            answer = EncodedChunk(error=error)
        write_frame(sink, *answer.parts())


if __name__ == "__main__":
    serve()
