"""The first module that every command imports: from here on Ctrl-C, SIGTERM and SIGHUP end the program with one line.

Python's own answer, an exception in the middle of whatever is being imported, is swallowed by packages that try to
import something and go on without it.
"""

import signal

from cs336_systems.interrupt import end_at_once

for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(_number) in (signal.default_int_handler, signal.SIG_DFL):  # not in a worker, nor under nohup
        signal.signal(_number, end_at_once)


def main() -> int:
    """Entry point of `cs336`."""
    from cs336_systems import cli

    return cli.main()


def benchmark() -> int:
    """Entry point of `benchmark.py`."""
    from cs336_systems import cli

    return cli.benchmark()


def sweep() -> int:
    """Entry point of `benchmark_sweep.py`."""
    from cs336_systems import cli

    return cli.sweep()


def precision() -> int:
    """Entry point of `precision.py`."""
    from cs336_systems import cli

    return cli.precision()
