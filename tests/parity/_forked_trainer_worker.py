"""Ranks of test_sequence_trainer.py: those of ``_trainer_worker``, as copies of one process that has imported all."""

from __future__ import annotations

import sys
from functools import partial

import _trainer_worker
from _forks import run_forked

if __name__ == "__main__":
    jobs, ranks = sys.argv[1:]
    sys.exit(run_forked(int(ranks), partial(_trainer_worker.main, jobs)))
