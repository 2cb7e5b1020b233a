"""The first module that every command imports: from here on Ctrl-C, SIGTERM and SIGHUP end the
program with one line.

Python's own answer, an exception in the middle of whatever is being imported, is swallowed by
packages that try to import something and go on without it.
"""

import gc
import signal

from .interrupt import STOP_SIGNALS, end_at_once

for _number in STOP_SIGNALS:
    # a worker has its own handlers, and under nohup SIGHUP is ignored
    if signal.getsignal(_number) in (signal.default_int_handler, signal.SIG_DFL):
        signal.signal(_number, end_at_once)


def main(command: str = "main") -> int:
    """Entry point of `cs336`, or of the script that is named after its command; returns the exit
    status.
    """
    from . import cli

    status: int = getattr(cli, command)()
    # at exit, Python would search all of PyTorch's objects for garbage, which takes half a second
    gc.freeze()
    return status
