"""The process that encodes samples for another one; it imports neither torch nor its parent's main module."""

from __future__ import annotations

import os
import sys

from partool_runtime.chat._frames import EncodedChunk, samples_from_json, settings_from_json
from partool_runtime.chat.encode import Encoder
from partool_runtime.errors import ConfigurationError
from partool_runtime.frames import read_frame, write_frame


def serve() -> None:
    """EncodedChunk frames of samples from standard input on standard output until the input ends.

    The first frame holds the encoder's settings. What libraries print goes to standard error.
    """
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    settings = settings_from_json(read_frame(source)[0])
    encoder = Encoder.of_settings(settings)
    while parts := read_frame(source):
        try:
            answer = EncodedChunk(encoder.encode(samples_from_json(parts[0])))
        except ConfigurationError as error:
            answer = EncodedChunk(error=error)
        write_frame(sink, *answer.parts())


if __name__ == "__main__":
    serve()
