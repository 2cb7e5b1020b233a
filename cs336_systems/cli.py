"""The command line: argv goes to a command, and how the command ends becomes an exit status (commands/outcome.py)."""

import functools
import importlib
import operator
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Annotated, Any

from cs336_systems import __version__
from cs336_systems.analysis.kernels.nsys import NsysError
from cs336_systems.commands.outcome import FAILED, INTERRUPTED, OK, USAGE, UsageError, guard_outputs, print_last
from cs336_systems.files import FileError, error_in_words
from cs336_systems.interrupt import LINE
from cs336_systems.sweep.locks import LockedError
from cs336_systems.text import print_aside

COMMANDS = (
    "benchmark", "sweep", "kernels", "memory", "account", "scale", "precision", "fusion", "attention",
    "ceilings", "ladder", "compare", "report",
)  # fmt: skip
"""The subcommands of `cs336`."""
MODULES = dict.fromkeys(("precision", "fusion", "attention"), "study")
"""The module of commands/ that has a command, if not that of its name; it is imported only when it is called."""
QUESTION = "Where do the time and the memory of a Transformer training step go?"
VERSION_HELP = "cs336 --version prints the version of this program."


def _exit_status(main: Callable[..., int]) -> Callable[..., int]:
    """Turn what `main` raises into one line on standard error and an exit status."""

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        from cs336_systems.sweep.store import SweepError

        guard_outputs()
        if list(sys.argv[1:] if argv is None else argv) == ["--version"]:
            print(f"cs336-systems-benchmark {__version__}")
            return OK
        try:
            return main(argv)
        except (UsageError, FileError) as error:
            print_aside(f"error: {error}")
            return USAGE
        except (SweepError, LockedError, NsysError, OSError) as error:
            message = error_in_words(error) if isinstance(error, OSError) else error
            print_aside(f"error: {message}")
            return FAILED
        except KeyboardInterrupt:  # a run in a worker was stopped
            print_last(LINE)
            return INTERRUPTED

    return run


@_exit_status
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `cs336`: the first word names the command, and the others are its arguments."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        return _run(words[0], f"cs336 {words[0]}", (_sides_apart(words) if words[0] == "compare" else words)[1:])
    import tyro

    from cs336_systems.commands.flags import parse

    subcommands = [Annotated[_arguments(name), tyro.conf.subcommand(name)] for name in COMMANDS]
    command: Any = functools.reduce(operator.or_, subcommands)
    parse(command, "cs336", words, f"{QUESTION}\n\n{VERSION_HELP}")  # prints the help or the error, and exits
    raise UsageError(f"needed a command: {', '.join(COMMANDS)}")


def _run(name: str, prog: str, argv: Sequence[str] | None) -> int:
    from cs336_systems.commands.flags import parse

    status: int = _module(name).run(parse(_arguments(name), prog, argv))
    return status


def _arguments(name: str) -> Callable[..., object]:
    """The dataclass of the command's arguments, such as `BenchmarkArguments`, from which the parser makes flags."""
    arguments: Callable[..., object] = getattr(_module(name), f"{name.capitalize()}Arguments")
    return arguments


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"cs336_systems.commands.{MODULES.get(name, name)}")


def _sides_apart(words: Sequence[str]) -> list[str]:
    """Put a space before each side of a comparison: the parser would take a side such as `--size small` for a flag."""
    from cs336_systems.commands.compare import is_side

    return [f" {word}" if is_side(word, words) else word for word in words]


benchmark = _exit_status(functools.partial(_run, "benchmark", "benchmark.py"))
"""Entry point of `benchmark.py`."""
sweep = _exit_status(functools.partial(_run, "sweep", "benchmark_sweep.py"))
"""Entry point of `benchmark_sweep.py`."""
precision = _exit_status(functools.partial(_run, "precision", "precision.py"))
"""Entry point of `precision.py`."""
