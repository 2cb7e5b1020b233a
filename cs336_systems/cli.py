"""The command line: argv goes to a command, and how the command ends becomes an exit status
(commands/outcome.py).
"""

import difflib
import functools
import importlib
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from . import __version__
from .analysis.kernels import NsysError
from .commands.outcome import FAILED, INTERRUPTED, OK, USAGE, UsageError, guard_outputs, print_last
from .files import FileError, error_in_words
from .interrupt import LINE
from .plugins import PluginError
from .sweep.store import LockedError, SweepError
from .text import print_aside
from .torch_needed import TorchError

GROUPS = {
    "Measure": {
        "benchmark": "Time one training step: forward, backward, optimizer.",
        "sweep": "Time a grid of steps, and write tables, pictures and a page.",
        "compare": "Say which of two configurations, or sweeps, is faster.",
        "ladder": "Go from fp32 to the fastest known step, one change at a time.",
        "attention": "Time attention alone, PyTorch's kernels and your own.",
        "fusion": "Time GELU, softmax, RMSNorm and attention, fused and written out.",
        "precision": "Show what accumulation, layer norm and autocast do to precision.",
        "ceilings": "Measure what this machine reaches: matmuls, memory, launches.",
    },
    "Explain": {
        "kernels": "Say where the time of profiled steps went; files of any program.",
        "memory": "Say where the memory of recorded steps went; files of any program.",
        "report": "Write tables, pictures and pages of finished runs again.",
    },
    "Forecast": {
        "account": "Say what a step costs without running it, and whether it fits.",
        "plan": "Say whether a training fits, how long it takes and what it costs.",
    },
}
"""The subcommands of `cs336`, by what they are for."""
COMMANDS = tuple(name for group in GROUPS.values() for name in group)
MODULES = dict.fromkeys(("precision", "fusion", "attention", "ceilings"), "study") | {
    "kernels": "explain",
    "memory": "explain",
}
"""The module in commands/ of each command that has none of its own name; modules are imported only
when their command is called.
"""
EXAMPLES = ("benchmark --profile", "kernels trace.json.gz", "account --size xl --device-name H100")
"""What the help of `cs336` begins with."""
HELP_WORD = "help"
"""What some type in the place of `--help`."""
NO_CHATTER = "6"
"""Log level from which PyTorch's profiler prints nothing, not even that it begins or finds no GPU.
"""
QUESTION = "Where do the time and the memory of a Transformer training step go?"


def _words(argv: Sequence[str] | None) -> list[str]:
    """These words of a command line; without any, those that the program was started with."""
    return list(sys.argv[1:] if argv is None else argv)


def _exit_status(main: Callable[..., int]) -> Callable[..., int]:
    """Turn what `main` raises into one line on standard error and an exit status."""

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        guard_outputs()
        os.environ.setdefault("KINETO_LOG_LEVEL", NO_CHATTER)
        if _words(argv) == ["--version"]:
            print(f"cs336-systems-benchmark {__version__}")
            return OK
        try:
            try:
                return main(argv)
            finally:
                sys.stdout.flush()  # at exit, Python would report a full disk by a traceback
        except (UsageError, FileError, PluginError, TorchError) as error:
            print_aside(f"error: {error}")
            return USAGE
        except (SweepError, LockedError, NsysError, OSError) as error:
            message = error_in_words(error) if isinstance(error, OSError) else error
            print_aside(f"error: {message}")
            return FAILED
        except KeyboardInterrupt:  # raised where a worker was stopped by a signal
            print_last(LINE)
            return INTERRUPTED

    return run


@_exit_status
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `cs336`: the first word names the command, and the others are its
    arguments.
    """
    words = _words(argv)
    if words[:1] == [HELP_WORD]:
        words = [*words[1:2], "--help"]
    if not words:
        _print_commands()
        return USAGE
    command, *arguments = words
    if command in COMMANDS:
        if command == "compare":
            arguments = _sides_apart(words)[1:]
        return _run(command, f"cs336 {command}", arguments)
    if command not in ("-h", "--help", "--help-all"):
        close = difflib.get_close_matches(command.lower(), COMMANDS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UsageError(f"cs336 has no command {command!r}{hint} (cs336 --help lists them)")
    _print_commands()
    return OK


def _print_commands() -> None:
    """Print the help of `cs336` itself: its commands by what they are for."""
    print("usage: cs336 COMMAND [FLAGS]")
    for example in EXAMPLES:
        print(f"  cs336 {example}")
    print(f"\n{QUESTION}")
    width = shutil.get_terminal_size().columns
    for title, group in GROUPS.items():
        print(title)
        for name, line in group.items():
            print(textwrap.fill(f"  {name:<11}{line}", width, subsequent_indent=" " * 13))
    print("\nCOMMAND --help explains a command, --help-all all its flags; cs336 --version")


def _run(name: str, prog: str, argv: Sequence[str] | None) -> int:
    """Run the command `name` with these arguments, by default the program's own; `prog` is what
    its help calls it.
    """
    from .commands.examples import examples_of
    from .commands.flags import SETTING_FIELDS
    from .commands.parse import flag_names, in_flags, parse

    arguments = _arguments(name)
    words = _words(argv)
    # a file of that name may be meant, as in `cs336 kernels help`
    if words == [HELP_WORD] and not Path(HELP_WORD).exists():
        words = ["--help"]
    try:
        examples = examples_of(name, prog)
        status: int = _module(name).run(parse(arguments, prog, words, examples))
    except UsageError as error:
        raise UsageError(in_flags(str(error), {*SETTING_FIELDS, *flag_names(arguments)})) from error
    return status


def _arguments(name: str) -> Callable[..., object]:
    """The dataclass of the command's arguments, such as `BenchmarkArguments`, from which the
    parser makes flags.
    """
    arguments: Callable[..., object] = getattr(_module(name), f"{name.capitalize()}Arguments")
    return arguments


def _module(name: str) -> ModuleType:
    """The module that implements the command, imported on first use."""
    return importlib.import_module(f".commands.{MODULES.get(name, name)}", __package__)


def _sides_apart(words: Sequence[str]) -> list[str]:
    """Put a space before each side of a comparison: the parser would take a side such as `--size
    small` for a flag.
    """
    from .commands.compare import is_side

    return [f" {word}" if is_side(word, words) else word for word in words]


benchmark = _exit_status(functools.partial(_run, "benchmark", "benchmark.py"))
"""Entry point of `benchmark.py`."""
sweep = _exit_status(functools.partial(_run, "sweep", "benchmark_sweep.py"))
"""Entry point of `benchmark_sweep.py`."""
precision = _exit_status(functools.partial(_run, "precision", "precision.py"))
"""Entry point of `precision.py`."""
