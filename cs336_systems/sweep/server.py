"""Imported by the fork server first. Sets how it ends and handles signals, and imports what explains profiles.

It needs no torch.
"""

import os
import signal

from cs336_systems.sweep.process import FORKER_VARIABLE, STOP_SIGNALS, die_with_forker

die_with_forker(signal.SIGKILL)  # a worker keeps it alive otherwise, even when the sweep is dead
if os.getppid() != int(os.environ.pop(FORKER_VARIABLE, os.getppid())):
    os._exit(1)  # dead already
for number in STOP_SIGNALS:
    signal.signal(number, signal.SIG_IGN)  # the sweep answers them
signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

import cs336_systems.analysis.kernels.explain  # noqa: E402
import cs336_systems.analysis.memory.explain  # noqa: E402, F401
