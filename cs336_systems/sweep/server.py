"""Imported first by the fork server, to set when the server ends and which signals it ignores.

Garbage is collected in workers only: in the server, collections during PyTorch's import would
traverse all its objects.
"""

import gc
import os
import signal

from ..interrupt import STOP_SIGNALS
from .process import FORKER_VARIABLE, die_with_forker, forget_safe_path

# otherwise a worker would keep the fork server alive after the sweep
die_with_forker(signal.SIGKILL)
if os.getppid() != int(os.environ.pop(FORKER_VARIABLE, os.getppid())):
    os._exit(1)  # the sweep has ended already
for number in STOP_SIGNALS:
    signal.signal(number, signal.SIG_IGN)  # the sweep handles them
signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
forget_safe_path()
gc.disable()
