"""How a command ends at once when it is interrupted: with one line on standard error, and exit
status 130.
"""

import os
from typing import NoReturn

STATUS = 130
LINE = "interrupted"


def end_at_once(*_: object) -> NoReturn:
    """End the process now, as a handler of signals too.

    Files are written atomically, and the kernel ends the processes that this one started.
    """
    try:
        clear = "\r\x1b[K" if os.isatty(2) else ""  # erases a status line
        os.write(2, f"{clear}{LINE}\n".encode())
    finally:  # also if the reader of standard error has gone
        os._exit(STATUS)
