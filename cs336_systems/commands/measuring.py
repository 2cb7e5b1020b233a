"""Measuring the runs of a sweep, a comparison or a ladder, and writing and printing what came of
them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import Device, RunConfig
from ..record import RUNS, RunRecord
from ..report.progress import IMPORTING, StatusLine
from ..studies.ceilings_files import ceilings_beside, load_ceilings_or_warn
from ..sweep.nsys import is_under_nsys
from ..sweep.store import raw_profile_path, writing
from ..text import print_aside, print_line
from ..torch_needed import require_torch
from .flags import MeasuringArguments
from .machine import look_at_machine
from .outcome import INTERRUPTED, UsageError, print_last, print_profile_paths, status_of

if TYPE_CHECKING:
    from ..report.results import Results
    from ..sweep.run import Outcome


def measure_all(
    configs: Sequence[RunConfig],
    directory: Path,
    measuring: MeasuringArguments,
    elsewhere: Callable[..., "Outcome"] | None = None,
    show: Callable[[Sequence[RunRecord], Path, StatusLine, Collection[str]], None] | None = None,
    names: Mapping[RunConfig, str] | None = None,
    begin: Callable[[], object] = lambda: None,
) -> int:
    """Run the configurations that have no result in `directory` yet, and call `show` with all
    records, by default `show_results`. Return the exit status.

    `elsewhere` measures on other machines in place of `run_sweep`. `names` are shown while
    configurations run. `begin` is called first, once no other process writes into the directory.
    """
    _refuse_nsys()
    from ..sweep.run import run_sweep

    if elsewhere is None:
        require_torch("measuring")
        note_unused_gpus(configs)
    first = IMPORTING if elsewhere is None else "connecting to the cluster"
    with StatusLine(names, first) as status, writing(directory):
        begin()
        measure = elsewhere or run_sweep
        outcome = measure(
            configs,
            directory,
            status,
            timeout_s=measuring.timeout_s,
            fresh=measuring.fresh,
            allow_mixed=measuring.allow_mixed,
        )
        (show or show_results)(outcome.records, directory, status, measuring.formats)
    if outcome.interrupted:
        print_last("interrupted: the same command goes on from here")
        return INTERRUPTED
    wanted = {config.key for config in configs}
    records = [record for record in outcome.records if record.key in wanted]
    return status_of(records, outcome.unexplained)


def _refuse_nsys() -> None:
    """Raise UsageError if nsys started this process."""
    if is_under_nsys():
        raise UsageError(
            "a sweep under nsys would take its times for those of plain runs: leave nsys out, and "
            "use --nsys instead"
        )


def show_results(
    records: Sequence[RunRecord], directory: Path, status: StatusLine, formats: Collection[str]
) -> None:
    """Write tables, plots and page of the sweep in the directory, and print the tables."""
    status("reading records and profiles")
    from ..report.page.chapters import write_page_of
    from ..report.page.directory import Directory
    from ..report.results import Results
    from ..report.terminal import print_sweep

    results = Results.load(records, directory, load_ceilings_or_warn(ceilings_beside(directory)))
    write_results(results, directory, status, formats)
    page = None
    if records:
        page, _ = write_page_of(Directory(path=directory, results=results), status)
    status.end()
    print_sweep(results.tables(), records, directory)
    if page is not None:
        print_line(f"page: {page}")
    print_profile_paths([record.subject for record in records], directory / RUNS)


def write_results(
    results: "Results", directory: Path, status: StatusLine, formats: Collection[str]
) -> None:
    """Write the tables and pictures of the sweep into its directory, tables also in `formats`.

    Tables of profiles that would lose runs, which cannot be explained any more, stay as they are,
    with a warning.
    """
    if not all(
        raw_profile_path(config, directory / RUNS).is_file() for config in results.without_profile
    ):
        what = "the tables of profiles stay as they were; --fresh measures these runs again"
        print_aside(f"warning: {directory}: {results.lost}, and {what}")
        results = replace(results, kernels=(), memory=())
    results.write(directory, status, formats)


def note_unused_gpus(configs: Sequence[RunConfig]) -> None:
    """Say on standard error which visible GPUs a sweep of these does not use, and what may put
    its times in doubt.
    """
    from ..sweep.run import gpus_left_out

    look_at_machine(configs[0].device if configs else Device.CPU)

    for gpu in gpus_left_out(configs):
        print_aside(
            f"note: GPU {gpu.index} ({gpu.name}) is left out: it is of another kind than the "
            "first visible one; choose with CUDA_VISIBLE_DEVICES"
        )
