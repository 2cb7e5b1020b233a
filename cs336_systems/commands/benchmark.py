"""`benchmark.py`: one configuration, measured in this process itself, so that nsys can record
it.
"""

import contextlib
import importlib
import os
from collections.abc import Sequence
from dataclasses import field
from functools import partial
from pathlib import Path

from .. import waits
from ..analysis.warnings import judged
from ..config import Device, Profiler, RunConfig
from ..measure.environment import lacking_memory
from ..measure.nvml import alike, visible_gpus
from ..record import RUNS, RunRecord, write_record
from ..report.progress import StatusLine
from ..subject import Subject
from ..sweep import store
from ..sweep.nsys import CAPTURED_STEPS, FORKED, is_under_nsys
from ..text import counted, print_aside, print_line
from ..torch_needed import require_torch
from ..tried_imports import do_meanwhile
from . import flags, outcome
from .configure import (
    checked_here,
    chosen_profiler,
    config_of,
    default_on,
    explain_fast,
    one_precision,
    profiled_config,
)
from .machine import explain_cpu_fallback, look_at_machine, resolve_device


@flags.with_flags(*flags.FIRST)
class BenchmarkArguments(flags.Flags):
    """Time one step of training: forward, backward and optimizer, with warm-up and synchronisation.

    The record, with every raw time, goes to OUTPUT/e2e_benchmark/single/runs/. Under `nsys profile`
    the same command makes a report with named ranges.
    """

    mixed_precision: flags.Switch = False
    """Short for --precision bf16."""
    fast: flags.Switch = False
    """Compute the same step in the fastest way known for this device, on a GPU in bf16. Rules
    choose the settings, and they are printed; flags that contradict them are refused.
    """
    model: flags.Flat[flags.ModelArguments] = field(default_factory=flags.ModelArguments)
    step: flags.Flat[flags.StepArguments] = field(default_factory=flags.StepArguments)
    profile: flags.Switch = False
    """Record the measured steps with torch.profiler, and say where the time went, kernel by kernel
    (on a CPU, operator by operator). The run is slower for it, and its times are not for
    publication.
    """
    memory: flags.Switch = False
    """Record the allocator's history over two steps, and say where the memory went."""
    memory_first_step: flags.Switch = False
    """Like --memory, but for the very first step, in which the optimizer's state is made."""
    until_stable: flags.Switch = False
    """Go on after --measured-steps until the 95 % interval of this process's mean, in which steps
    that resemble each other count less, is within 1 %, at most 200 steps. Another process may
    differ by more: `compare` takes several.
    """
    timeout_s: float = 600.0
    """Longest time for a run on several ranks (seconds); a run in one process has no limit."""
    output: Path = Path("data")
    """Directory for results."""
    json: flags.Switch = False
    """Print the record as JSON instead of a table."""

    def __post_init__(self) -> None:
        """Raise ValueError for a time limit that is none, and for flags that do not go with
        --until-stable.
        """
        flags.check_timeout(self.timeout_s)
        is_profiled = self.profile or self.memory or self.memory_first_step
        if self.until_stable and (is_profiled or self.step.ranks):
            raise ValueError(
                "--until-stable goes on in one process without a profiler; leave out the other flag"
            )

    def config(self) -> RunConfig:
        """The run that these flags describe; raise ValueError if they contradict each other."""
        device = resolve_device(self.step.device)
        asked = self.given()
        point = {
            "size": asked.get("size", default_on(device, "size")),
            "precision": one_precision(self.precision, self.mixed_precision),
        }
        plain = config_of(device, asked, point, fast=self.fast)
        if (lacking := lacking_memory(plain)) is not None:
            raise ValueError(
                f"this step {lacking}: choose a smaller --size, --batch-size or --context-length"
            )
        return checked_here(
            profiled_config(plain, self._profiler(), first_step=self.memory_first_step)
        )

    def _profiler(self) -> Profiler:
        """The profiler of the run: the one asked for, or nsys if that started this process."""
        asked = chosen_profiler(self)
        if not is_under_nsys():
            return asked
        if asked is not Profiler.NONE:
            raise ValueError(
                "two profilers cannot watch one process: leave out nsys or the flag of the other "
                "one"
            )
        return Profiler.NSYS if resolve_device(self.step.device) is Device.CUDA else Profiler.NONE


def run(arguments: BenchmarkArguments) -> int:
    """Measure the run, write its record, print its tables, and return the exit status."""
    if arguments.fast and not arguments.step.ranks:
        do_meanwhile(_import_pytorch)
    config = outcome.checked(arguments.config)
    require_torch("measuring")
    explain_cpu_fallback(arguments.step.device)
    if arguments.fast:
        explain_fast([config])
    if config.is_shared and is_under_nsys():
        print_aside(
            f"note: nsys records ranks only with {FORKED}, and whole with "
            f"{' '.join(CAPTURED_STEPS)}"
        )
    folder = store.PROFILE_DIRECTORIES[config.profiler]
    runs = store.make_writable(arguments.output / folder / "single" / RUNS)
    with contextlib.ExitStack() as stack:
        print_json = stack.enter_context(outcome.json_alone(arguments.json))
        _lock(config, runs, stack)
        look_at_machine(config.device)
        if (kept := store.set_aside_run(config, runs)) is not None:
            print_aside(f"note: the earlier run of this configuration is kept as {kept}")
        with StatusLine() as status:
            record, unexplained = _measured(config, runs, arguments, status)
        if print_json is not None:
            print_json(outcome.with_statistics(record, record.times_s))
            print_line(f"record: {runs / record.key}.json")
        else:
            from ..report.terminal import print_measured

            print_measured(record, runs)
        outcome.print_profile_paths([config], runs)
        if print_json is None:
            from ..report.page.chapters import write_page_of_runs

            outcome.print_page(partial(write_page_of_runs, runs.parent))
    return outcome.status_of([record], unexplained)


def _measured(
    config: RunConfig, runs: Path, arguments: BenchmarkArguments, status: StatusLine
) -> tuple[RunRecord, Sequence[Subject]]:
    """Measure the run, keep its record, and explain its profile; return the record, and the run
    itself if its profile could not be explained.
    """
    profile = None
    if config.profiler is not Profiler.NSYS:  # whose command line has the report's path
        profile = store.fresh_profile_path(config, runs.absolute())
    record = _measure(config, runs, profile, arguments, status)
    # as it was measured, before judging takes its time
    write_record(record, runs)
    record = judged(record)
    write_record(record, runs)
    if profile is None:
        return record, ()
    from ..sweep.run import explain_again

    return record, explain_again([record], runs, status)


def _lock(config: RunConfig, runs: Path, stack: contextlib.ExitStack) -> None:
    """Lock the GPUs that the run takes, and its configuration, until the stack ends."""
    gpus = alike(visible_gpus()) if config.device is Device.CUDA else ()
    stack.enter_context(store.exclusive_gpus(gpus[: config.ranks]))
    path = runs.with_name(f".{config.key}.lock")
    stack.enter_context(store.exclusive(path, f"this configuration in {runs}"))


def _measure(
    config: RunConfig,
    runs: Path,
    profile: Path | None,
    arguments: BenchmarkArguments,
    status: StatusLine,
) -> RunRecord:
    """Measure in this process, or several ranks in processes of their own."""
    if config.is_shared:
        from ..sweep.run import measure_one

        status(f"measuring on {counted(config.ranks, 'rank')}")
        return measure_one(config, runs, timeout_s=arguments.timeout_s)
    waits.tell(status)
    waits.note_since_start("reading the command")
    _import_pytorch()
    from ..measure.run import measure

    here = Path.cwd()
    with outcome.stdout_to_stderr():
        record = measure(config, profile=profile, until_stable=arguments.until_stable)
    os.chdir(here)  # the user's own model may have changed it
    return record


def _import_pytorch() -> None:
    """Import what measures, if PyTorch is installed."""
    with waits.waiting_for("importing PyTorch"), contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("..measure.run", __package__)
