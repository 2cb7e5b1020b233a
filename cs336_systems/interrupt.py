"""How a command ends at once when it is interrupted: with one line on standard error, and exit
status 130.
"""

import os
import signal
from typing import NoReturn

STATUS = 130
LINE = "interrupted"
STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""Signals that end a command: Ctrl-C, the system, a closing terminal, which Windows has no signal
for; often sent to the whole process group.
"""


def end_at_once(*_: object) -> NoReturn:
    """End the process now, as a handler of signals too.

    Files are written atomically, and the kernel ends the processes that this one started.
    """
    try:
        clear = "\r\x1b[K" if os.isatty(2) else ""  # erases a status line
        os.write(2, f"{clear}{LINE}\n".encode())
    finally:  # also if the reader of standard error has gone
        os._exit(STATUS)
