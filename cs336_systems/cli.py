"""From argv to a command at once, and from what happens to an exit status (commands/outcome.py lists them)."""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import tyro

from cs336_systems.commands import account as _account
from cs336_systems.commands import attention as _attention
from cs336_systems.commands import benchmark as _benchmark
from cs336_systems.commands import ceilings as _ceilings
from cs336_systems.commands import compare as _compare
from cs336_systems.commands import fusion as _fusion
from cs336_systems.commands import kernels as _kernels
from cs336_systems.commands import ladder as _ladder
from cs336_systems.commands import memory as _memory
from cs336_systems.commands import napkin as _napkin
from cs336_systems.commands import precision as _precision
from cs336_systems.commands import report as _report
from cs336_systems.commands import sweep as _sweep
from cs336_systems.commands.flags import parse
from cs336_systems.commands.outcome import FAILED, INTERRUPTED, USAGE, UsageError
from cs336_systems.json_files import FileError
from cs336_systems.locks import LockedError
from cs336_systems.nsys_run import NsysError

Command = (
    Annotated[_kernels.KernelsArguments, tyro.conf.subcommand("kernels")]
    | Annotated[_memory.MemoryArguments, tyro.conf.subcommand("memory")]
    | Annotated[_account.AccountArguments, tyro.conf.subcommand("account")]
    | Annotated[_fusion.FusionArguments, tyro.conf.subcommand("fusion")]
    | Annotated[_attention.AttentionArguments, tyro.conf.subcommand("attention")]
    | Annotated[_ceilings.CeilingsArguments, tyro.conf.subcommand("ceilings")]
    | Annotated[_ladder.LadderArguments, tyro.conf.subcommand("ladder")]
    | Annotated[_compare.CompareArguments, tyro.conf.subcommand("compare")]
    | Annotated[_report.ReportArguments, tyro.conf.subcommand("report")]
)
"""What follows `cs336`."""


def _exit_status(main: Callable[..., int]) -> Callable[..., int]:
    """Turn what `main` raises into one line on standard error and an exit status."""

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        from cs336_systems.store import SweepError

        try:
            return main(argv)
        except UsageError as error:
            print(f"error: {error}", file=sys.stderr)
            return USAGE
        except (SweepError, LockedError, FileError, NsysError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return FAILED
        except KeyboardInterrupt:
            return INTERRUPTED

    return run


@_exit_status
def benchmark(argv: Sequence[str] | None = None) -> int:
    """`benchmark.py`."""
    return _benchmark.run(parse(_benchmark.BenchmarkArguments, "benchmark.py", argv))


@_exit_status
def sweep(argv: Sequence[str] | None = None) -> int:
    """`benchmark_sweep.py`."""
    return _sweep.run(parse(_sweep.SweepArguments, "benchmark_sweep.py", argv))


@_exit_status
def precision(argv: Sequence[str] | None = None) -> int:
    """`precision.py`."""
    return _precision.run(parse(_precision.PrecisionArguments, "precision.py", argv))


@_exit_status
def main(argv: Sequence[str] | None = None) -> int:
    """`cs336`."""
    words = list(sys.argv[1:] if argv is None else argv)
    # A side of a comparison is a value, which the parser would take for a flag: a space before it tells the two apart.
    if words[:1] == ["compare"]:
        words = [f" {word}" if _compare.is_side(word, words) else word for word in words]
    if words[:2] == ["account", "napkin"]:
        return _napkin.run(parse(_napkin.NapkinArguments, "cs336 account napkin", words[2:]))
    question = "Where do the time and the memory of a Transformer training step go?"
    arguments: object = parse(Command, "cs336", words, question)  # type: ignore[arg-type]
    return _COMMANDS[type(arguments)](arguments)


_COMMANDS: dict[type, Callable[..., int]] = {
    _kernels.KernelsArguments: _kernels.run,
    _memory.MemoryArguments: _memory.run,
    _account.AccountArguments: _account.run,
    _fusion.FusionArguments: _fusion.run,
    _attention.AttentionArguments: _attention.run,
    _ceilings.CeilingsArguments: _ceilings.run,
    _ladder.LadderArguments: _ladder.run,
    _compare.CompareArguments: _compare.run,
    _report.ReportArguments: _report.run,
}
