"""`cs336 ladder`: from the slow way to the fast way, one change at a time, each measured and
each checked.
"""

from collections.abc import Collection, Sequence
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..analysis.compare import interleave
from ..config import Device, RunConfig
from ..measure.nvml import visible_gpus
from ..record import RUNS, RunRecord
from ..report.progress import StatusLine
from ..studies.ceilings_files import Ceilings, ceilings_beside, load_ceilings_or_warn
from ..sweep.ladder import (
    GATE_STEPS,
    RUNG_NAMES,
    Rung,
    chosen,
    gate_learning_rate,
    read_ladder,
    reason_run,
    rungs,
    write_ladder,
)
from ..sweep.nsys import is_under_nsys
from ..text import counted, plain_word, print_line
from . import flags
from .configure import checked_factory, make_config
from .machine import DeviceFlag, device_word, explain_cpu_fallback, resolve_device
from .measuring import measure_all
from .outcome import OK, UsageError, checked, load_records_or_warn, show

if TYPE_CHECKING:
    from ..report.page.directory import Directory

USUAL_STEP = {
    Device.CUDA: {"size": "gpt2", "batch_size": 16},
    Device.CPU: {"size": "tiny", "batch_size": 4},
}
USUAL_REPEATS = {Device.CUDA: 3, Device.CPU: 1}
LADDER_FILE = "ladder.json"


@flags.with_flags(
    "size",
    "context_length",
    "batch_size",
    "vocab_size",
    "d_model",
    "d_ff",
    "num_layers",
    "num_heads",
    "model_factory",
    "warmup_steps",
    "measured_steps",
    "learning_rate",
    "tokens",
    "seed",
    warmup_steps=10,
    rules={
        "size": "gpt2 on a GPU, tiny on a CPU",
        "context_length": "1024 for gpt2, else 512 on a GPU, 128 on a CPU",
        "batch_size": "16 on a GPU, 4 on a CPU",
        "learning_rate": "0.005 / d_model",
    },
)
class LadderArguments(flags.Flags):
    """Go from an eager fp32 step to the fastest known step, one change at a time, and say what each
    change gains.

    A rung is one change, on top of those before it. Each rung runs in fresh processes, interleaved
    with the others, and once more under torch.profiler, which shows why it is faster. Results go to
    OUTPUT/ladder/NAME/. To go on with an interrupted ladder, give the same command again.

    Losses are compared over 20 steps, so at least as many must be run, warm-up included. A rung
    whose losses leave those of the first is marked, and its gain does not count. With a larger
    learning rate, rounding alone drives the losses of large models apart. Rungs that change the
    inside of the model are left out for --model.
    """

    rungs: Annotated[
        tuple[str, ...] | None,
        flags.unset(
            "NAME [NAME ...]",
            "all that apply",
            f"Rungs to run, of {' '.join(RUNG_NAMES)}. A rung also has the changes of all rungs "
            "before it, named or not; fp32 always runs.",
        ),
    ] = None
    repeats: Annotated[int | None, flags.unset("INT", "3 on a GPU, 1 on a CPU")] = None
    """Fresh processes of each rung, interleaved; fewer than three give no intervals."""
    reasons: bool = True
    """Run each rung once more under torch.profiler."""
    device: DeviceFlag = "auto"
    name: Annotated[str | None, flags.unset("NAME", "size, context, batch and device")] = None
    """Name of the directory."""
    output: Path = Path("data")
    """Directory for results."""
    measuring: flags.Flat[flags.MeasuringArguments] = field(
        default_factory=flags.MeasuringArguments
    )
    dry_run: flags.Switch = False
    """Print what would run, and stop."""

    def __post_init__(self) -> None:
        """Raise ValueError for too few processes, or for fewer steps than the gate compares losses
        over.
        """
        flags.check_repeats(flags.value_or(self.repeats, 1))
        if self.warmup_steps + self.measured_steps < GATE_STEPS:
            raise ValueError(
                f"--warmup-steps and --measured-steps must come to at least {GATE_STEPS}, over "
                f"which the losses are compared, got {self.warmup_steps} + {self.measured_steps}"
            )

    def base(self) -> RunConfig:
        """The first rung's shape, batch, data and steps; raise ValueError where the flags mean
        none.
        """
        device = resolve_device(self.device)
        given = self.given()
        settings: dict[str, Any] = USUAL_STEP[device] | given
        config = checked_factory(make_config(device, **settings), given)
        if self.learning_rate is not None:
            return config
        return replace(config, learning_rate=gate_learning_rate(config.model.d_model))

    def ladder(self) -> tuple[Rung, ...]:
        """The rungs that the flags name; raise ValueError for an unknown one."""
        base = self.base()
        gpu = visible_gpus()[0].name if base.device is Device.CUDA else None
        every = rungs(base, gpu)
        return every if self.rungs is None else chosen(every, self.rungs)

    def runs(self, ladder: Sequence[Rung]) -> tuple[RunConfig, ...]:
        """All runs in order: the rungs up and down again (A B B A), then each under the
        profiler.
        """
        usual = USUAL_REPEATS[ladder[0].config.device]
        order = interleave(len(ladder), flags.value_or(self.repeats, usual))
        runs = [replace(ladder[index].config, repeat=repeat) for index, repeat in order]
        if self.reasons:
            runs += map(reason_run, ladder)
        return tuple(runs)

    def directory(self) -> Path:
        """Where the results go; raise ValueError for a name that is no plain directory name."""
        if self.name is not None:
            return self.output / "ladder" / flags.checked_name(self.name)
        base = self.base()
        shape = f"ctx{base.model.context_length}_b{base.batch_size}"
        name = f"{plain_word(base.size)}_{shape}_{device_word(base.device)}"
        return self.output / "ladder" / name


def run(arguments: LadderArguments) -> int:
    """Measure the rungs that have no result yet, judge them, print and write."""
    ladder, directory = checked(arguments.ladder), checked(arguments.directory)
    configs = arguments.runs(ladder)
    explain_cpu_fallback(arguments.device)
    if arguments.dry_run:
        for rung in ladder:
            print(f"{rung.name}: {rung.change} ({rung.config.label})")
        print_line(f"{counted(len(configs), 'run')} into {directory}")
        return OK
    if is_under_nsys():
        raise UsageError(
            "a ladder under nsys would take its times for those of plain runs: leave nsys out"
        )
    begin = partial(_begin, ladder, directory, arguments.measuring.fresh)
    names = _names(ladder)
    return measure_all(
        configs, directory, arguments.measuring, show=_report, names=names, begin=begin
    )


def _begin(ladder: Sequence[Rung], directory: Path, fresh: bool) -> None:
    """Write the ladder; raise UsageError if the directory has that of another step, whose tables
    would be lost.
    """
    file = directory / LADDER_FILE
    first = ladder[0].config
    if not fresh and file.is_file():
        present = read_ladder(file)[0].config
        if present != first:
            raise UsageError(
                f"{directory} holds the ladder of another step ({present.label}; this one is "
                f"{first.label}): choose another --name, or start over with --fresh"
            )
    write_ladder(ladder, file)


def _names(ladder: Sequence[Rung]) -> dict[RunConfig, str]:
    """Names for the configurations of a ladder: that of the rung for a rung's runs, and the rung
    with the profiler for its profiled run.
    """
    names = {rung.config: rung.name for rung in ladder}
    return names | {reason_run(rung): f"{rung.name} under torch.profiler" for rung in ladder}


def load_results(directory: Path, beside: Ceilings) -> "Directory":
    """The results of the ladder in a directory: rungs, records and profiles, with shares of the
    ceilings `beside`.
    """
    from ..report.page.directory import Directory
    from ..report.results import Results
    from ..report.sections.kernels.entry import load_profiled
    from ..report.sections.ladder import ladder_results

    ladder = read_ladder(directory / LADDER_FILE)
    names = _names(ladder)  # the directory may have runs of ladders with other flags
    records = load_records_or_warn(directory / RUNS)
    records = [record for record in records if record.subject.configuration in names]
    profiled = load_profiled(records, directory)
    results = Results(records=records, kernels=profiled, ceilings=beside)
    rungs = ladder_results(ladder, records, profiled, beside)
    return Directory(path=directory, results=results, rungs=rungs)


def _report(
    _records: Sequence[RunRecord], directory: Path, status: StatusLine, formats: Collection[str]
) -> None:
    """Write the ladder's tables, picture and page from the records in the directory, and print the
    tables.
    """
    from ..report.page.chapters import write_page_of
    from ..report.sections.ladder import ladder_section, write_ladder_report

    status("reading records and profiles")
    results = load_results(directory, load_ceilings_or_warn(ceilings_beside(directory)))
    status("drawing and writing")
    write_ladder_report(results.rungs, directory, formats)
    page, _ = write_page_of(results, status)
    status.end()
    show(ladder_section(results.rungs).tables, directory)
    print_line(f"page: {page}")
