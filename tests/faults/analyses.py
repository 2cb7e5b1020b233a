"""Analyses that go wrong: each is the entry of a worker that is to explain a profile, and injects
one fault into it.

A worker's current directory is that of its sweep, so a fault leaves notes for the test there.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from cs336.sweep import keep

NEVER_S = 600
HANGING, NOTES = Path("hanging"), Path("notes")


def instead(config, runs, log, fault):
    """The worker as it is, with `fault` in the place of the analysis."""
    keep.explain_run = lambda *_: fault()
    keep.explain_in_worker(config, runs, log)


def raises(config, runs, log, rules=None):
    instead(config, runs, log, lambda: {}["no such lane\n\x1b"])


def segfault(config, runs, log, rules=None):
    instead(config, runs, log, lambda: os.kill(os.getpid(), signal.SIGSEGV))


def hangs(config, runs, log, rules=None):
    def hang():
        subprocess.Popen(["sleep", str(NEVER_S)])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        HANGING.touch()
        time.sleep(NEVER_S)

    instead(config, runs, log, hang)


def takes_all_memory(config, runs, log, rules=None):
    """On a machine of 2 GiB."""
    keep.host_memory_bytes = lambda: 2**31
    instead(config, runs, log, lambda: [np.zeros(2**28, dtype=np.uint8) for _ in range(1000)])


def cannot_write(config, runs, log, rules=None):
    runs.with_name("kernels").mkdir(exist_ok=True)
    (runs.with_name("kernels") / f"{config.key}.json").mkdir()
    keep.explain_in_worker(config, runs, log)


def notes_its_modules(config, runs, log, rules=None):
    NOTES.write_text(" ".join(sorted(sys.modules)))
    keep.explain_in_worker(config, runs, log)
