"""The methods of sequence parallelism by name; a new one is one module and one line."""

from __future__ import annotations

from partool.spec.parallel import SequenceMethod
from partool_runtime.parallel.sequence import all_gather as gather
from partool_runtime.parallel.sequence import dsp, ring, startrail, ulysses, usp
from partool_runtime.parallel.sequence.types import Put

METHODS: dict[SequenceMethod, Put] = {
    "ulysses": ulysses.put,
    "ring": ring.put,
    "usp": usp.put,
    "startrail": startrail.put,
    "all_gather": gather.put,
    "dsp": dsp.put,
}
