"""A process in which another system's own classes take what partool writes: ``python _judge.py SYSTEM``.

Each line of the input is a case as JSON, each line of the output what the classes made of it. The systems print to
standard output, which is therefore turned to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import warnings


def main(system: str) -> None:
    """Judge cases until the input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    judge = importlib.import_module(f"_judge_{system}").judge
    print(json.dumps("ready"), file=out, flush=True)
    for line in sys.stdin:
        try:
            verdict = judge(json.loads(line))
        except BaseException as error:  # some parsers end the process for a setting that they refuse
            verdict = {"refused": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-2000:]}
        print(json.dumps(verdict, default=str), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
