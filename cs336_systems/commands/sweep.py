"""`benchmark_sweep.py`: a grid of configurations, each in a fresh process, and its tables and
plots.
"""

import functools
import hashlib
import importlib.util
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..analysis.compare import interleave
from ..analysis.kernels import NsysError, find_nsys
from ..config import SETTINGS, Device, Mode, Parallel, Precision, Profiler, RunConfig
from ..costs.curves import Curves
from ..costs.fast_memory import peak_bytes as fast_peak_bytes
from ..costs.hardware import devices_called
from ..costs.memory import (
    fits,
    host_bytes,
    needs_tape,
    outside_bytes,
    predict_memory,
    predicted_peak_bytes,
)
from ..costs.ranks_time import predicted_time
from ..costs.time import prepare_forecasts
from ..measure.environment import cpu_name, host_memory_bytes, lacking_memory
from ..measure.nvml import usable_gpu_bytes, visible_gpus
from ..record import RunRecord
from ..report.progress import IMPORTING, StatusLine
from ..report.words import DOUBT, DOUBTED_FORECAST, SHIPPED, significant
from ..studies.ceilings_files import ceilings_beside, load_ceilings_or_warn
from ..sweep.nsys import is_under_nsys
from ..sweep.store import PROFILE_DIRECTORIES, raw_profile_path, writing
from ..text import counted, plain_word, print_aside, print_line
from . import flags
from .outcome import (
    FAILED,
    INTERRUPTED,
    OK,
    UsageError,
    checked,
    print_last,
    print_profile_paths,
    status_of,
)

if TYPE_CHECKING:
    from ..report.results import Results
    from ..sweep.cluster import Machine
    from ..sweep.run import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Configurations in the order to run them, and those that will not fit."""

    configs: tuple[RunConfig, ...]
    """Configurations by predicted peak, the smallest first; those predicted not to fit are last."""
    too_large: tuple[RunConfig, ...]
    """Configurations that are predicted to run out of memory."""


def make_plan(
    configs: Sequence[RunConfig], memory_bytes: int | None, *, of_users: bool = False
) -> Plan:
    """Order `configs` by predicted peak, and find those that do not fit `memory_bytes` of their
    device.

    Memory that is not known is None. It is predicted only without shortcuts. So a configuration
    with shortcuts, such as a compiled model, is ordered by the peak that it would have without
    them, and on a GPU it is never in `too_large`. Configurations without any prediction (on a CPU,
    and users' own models unless `of_users`, which traces them) follow in their given order.
    """
    wanted = [each for config in configs for each in (config, config.without_shortcuts)]
    if memory_bytes is not None:  # a tape is that of a GPU
        wanted += [
            replace(each, device=Device.CUDA) for each in configs if needs_tape(each, memory_bytes)
        ]
    prepare_forecasts(wanted, of_users=of_users)
    too_large = {
        config
        for config in configs
        if memory_bytes is not None and _is_too_large(config, memory_bytes)
    }
    peaks = {config: predicted_peak_bytes(config.without_shortcuts) for config in configs}
    ordered = sorted(
        configs, key=lambda config: (config in too_large, peaks[config] is None, peaks[config] or 0)
    )
    return Plan(
        configs=tuple(ordered), too_large=tuple(config for config in ordered if config in too_large)
    )


def _is_too_large(config: RunConfig, memory_bytes: int) -> bool:
    if config.device is Device.CPU:
        return (host_bytes(config, memory_bytes) or 0) > memory_bytes
    found = predict_memory(config)
    if found is None or found.reserved_bytes + outside_bytes(config) <= memory_bytes:
        return False
    return fits(config, memory_bytes) is False


@flags.with_flags(*flags.FIRST, many=flags.AXES)
class SweepArguments(flags.Flags):
    """Time a grid of sizes, context lengths, modes, precisions and other settings, each run in a
    fresh process, and write tables.

    Every flag that takes several values is an axis of the grid: --compile none default --attention
    naive sdpa makes four runs of each configuration.

    Records, tables (CSV, Markdown, LaTeX, Typst) and plots go to OUTPUT/e2e_benchmark/NAME/. The
    same command again goes on where an interrupted sweep stopped; what ran out of memory or failed
    has a row of its own.
    """

    mixed_precision: flags.Switch = False
    """Short for --precisions bf16."""
    repeats: int = 1
    """Fresh processes per configuration, interleaved; three or more give a confidence interval
    over their means.
    """
    fast: flags.Switch = False
    """Compute the same steps in the fastest way known for this device, on a GPU in bf16. Rules
    choose the settings, and they are printed; flags that contradict them are refused.
    """
    model: flags.Flat[flags.SweepModelArguments] = field(default_factory=flags.SweepModelArguments)
    step: flags.Flat[flags.SweepStepArguments] = field(default_factory=flags.SweepStepArguments)
    nsys: flags.Switch = False
    """Run every configuration once more under Nsight Systems, and say where its time went, kernel
    by kernel. Results go to OUTPUT/nsys_profiles/NAME/, the reports (.nsys-rep) too.
    """
    profile: flags.Switch = False
    """Like --nsys, but with torch.profiler, which needs no nsys and works on a CPU too (operator by
    operator); into OUTPUT/kineto_profiles/NAME/.
    """
    memory: flags.Switch = False
    """Run every configuration once more with the allocator's history, and say where its memory
    went; into OUTPUT/memory_profiles/NAME/, with snapshots for PyTorch's viewer. Two steps are
    recorded, after the warm-up.
    """
    memory_first_step: flags.Switch = False
    """Like --memory, but for the very first step, in which the optimizer's state is made."""
    name: Annotated[
        str | None, flags.unset("NAME", "mode, precision, what differs from the defaults, device")
    ] = None
    """Name of the directory."""
    output: Path = Path("data")
    """Directory for results."""
    measuring: flags.Flat[flags.MeasuringArguments] = field(
        default_factory=flags.MeasuringArguments
    )
    cluster: Annotated[str | None, flags.unset("ADDRESS", "this machine alone")] = None
    """Measure on all machines of the Ray cluster at this address; auto is the cluster that this
    machine belongs to. Profiles are brought from there.
    """
    require_device: Annotated[
        str | None, flags.unset("NAME", "that of the largest group of like machines")
    ] = None
    """With --cluster, measure only on machines whose device has this in its name, such as H200."""
    wait_nodes_s: float = 180.0
    """With --cluster, how long to wait for a machine while none is at work (seconds)."""
    dry_run: flags.Switch = False
    """Print what would run, and with --cluster on which machines, and stop."""

    def __post_init__(self) -> None:
        for group in (self, self.model, self.step):
            for name in group.settings:
                if getattr(group, name) == ():
                    raise ValueError(f"--{name.replace('_', '-')} needs at least one value")
        flags.check_repeats(self.repeats)
        self._check_cluster()

    def _check_cluster(self) -> None:
        if self.cluster is None:
            if self.require_device is not None:
                raise ValueError("--require-device needs --cluster")
            return
        if not re.fullmatch(r"auto|(?!\w+://)\S+:\d+", self.cluster):
            raise ValueError(
                "--cluster needs auto or HOST:PORT, as `ray status` shows it; got "
                f"{self.cluster[:120]!r}"
            )
        if not 0 < self.wait_nodes_s < float("inf"):
            raise ValueError(f"--wait-nodes-s must be positive and finite, got {self.wait_nodes_s}")

    @property
    def chosen_precisions(self) -> tuple[Precision, ...]:
        """The precisions of the grid, in order."""
        asked = self.precisions or (None,)
        return tuple(flags.one_precision(precision, self.mixed_precision) for precision in asked)

    def plan(self) -> Plan:
        """The grid in the order to run, without duplicates; repeats go forth and back (A B B A)."""
        device = self.device()
        on_gpu = device is Device.CUDA
        given, grid = self._given(), self._grid(on_gpu)
        once = dict.fromkeys(
            flags.config_of(device, given, point, fast=self.fast, many=True) for point in grid
        )
        # that of other machines is not known
        of_cpus = host_memory_bytes() if self.cluster is None else None
        memory_bytes = usable_gpu_bytes() if on_gpu else of_cpus
        plan = make_plan(list(once), memory_bytes, of_users=self.dry_run)
        order = interleave(len(plan.configs), self.repeats)
        repeats = [replace(plan.configs[index], repeat=repeat) for index, repeat in order]
        if self.profiler is not Profiler.NONE:
            profiled = functools.partial(
                flags.profiled_config, profiler=self.profiler, first_step=self.memory_first_step
            )
            pairs = (
                (plain, profiled(plain)) if plain.repeat == 0 else (plain,) for plain in repeats
            )
            repeats = list(itertools.chain.from_iterable(pairs))
        if self.cluster is None:
            repeats = list(map(flags.checked_here, repeats))
        return replace(plan, configs=tuple(repeats))

    def device(self) -> Device:
        """The device to measure on; with --cluster, a device named by --device need not be in
        this machine.
        """
        if self.cluster is not None and self.step.device == "cuda":
            return Device.CUDA
        return flags.resolve_device(self.step.device)

    @property
    def profiler(self) -> Profiler:
        """The profiler of the additional run of each configuration; raise ValueError if several
        are asked for.
        """
        return flags.chosen_profiler(self)

    def _axes(self, on_gpu: bool) -> dict[str, tuple[Any, ...]]:
        """The values of each axis of the grid by the name of its setting, in the order in which
        they are varied.
        """
        usual = {
            name: found.gpu_sweep if on_gpu else found.cpu_sweep
            for name in flags.AXES
            if (found := flags.FIELDS[name][1].by_device) is not None
        }
        values = usual | self._given() | {"precision": self.chosen_precisions}
        for part, setting in SETTINGS.items():
            if part not in values or setting.used_with is None:
                continue
            name, (kind, *others) = setting.used_with
            if not others and kind not in values.get(name, ()):
                values[name] = (*values.get(name, ()), kind)
        return {name: values[name] for name in flags.AXES if name in values}

    def _grid(self, on_gpu: bool) -> list[dict[str, Any]]:
        """Every combination of the axes' values, by the names of their settings.

        If other ways to share a step are in the grid, `none` gets one rank; alone it is refused
        with several ranks.
        """
        axes = self._axes(on_gpu)
        grid = [
            dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())
        ]
        if all(point["parallel"] is Parallel.NONE for point in grid):
            return grid
        return [
            point | {"ranks": 1} if point["parallel"] is Parallel.NONE else point for point in grid
        ]

    def _given(self) -> dict[str, Any]:
        """The flags of all groups by the names of their settings."""
        return {**self.given(), **self.model.given(), **self.step.given()}

    def directory(self) -> Path:
        """Where this sweep's results go; raise ValueError for a name that is no plain directory
        name.
        """
        return (
            self.output
            / PROFILE_DIRECTORIES[self.profiler]
            / (default_name(self) if self.name is None else flags.checked_name(self.name))
        )


def default_name(sweep: SweepArguments) -> str:
    """Modes, precisions, what differs from the defaults, and the device, so that machines do not
    collide.
    """
    device = sweep.device()
    groups = (sweep, sweep.model, sweep.step)
    axes, *different = [_differences(group, skip=("modes", "precisions")) for group in groups]
    repeats = [f"repeats-{sweep.repeats}"] if sweep.repeats > 1 else []
    parts = [
        "-".join(dict.fromkeys(sweep.modes)),
        "fast" if sweep.fast else "-".join(dict.fromkeys(sweep.chosen_precisions)),
        *axes,
        *repeats,
        *itertools.chain.from_iterable(different),
        flags.device_word(device),
    ]
    name = "_".join(plain_word(part) for part in parts)
    if len(name) > flags.MAX_NAME_LENGTH:
        name = (
            f"{name[: flags.MAX_NAME_LENGTH - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        )
    return name


def _differences(group: flags.Flags, skip: tuple[str, ...] = ()) -> Iterator[str]:
    """The flags whose values are not the defaults, each with its value: `attention-sdpa`."""
    for flag, name in group.settings.items():
        value, (each, setting) = getattr(group, flag), flags.FIELDS[name]
        if flag in skip or value == getattr(type(group), flag):
            continue
        values = dict.fromkeys(value if isinstance(value, tuple) else (value,))
        if not (setting.chosen_by_fast and [*values] == [each.default]):
            yield f"{flag}-{'-'.join(map(str, values))}"


def run(arguments: SweepArguments) -> int:
    """Measure a grid and write its tables and plots."""
    plan, directory = checked(arguments.plan), checked(arguments.directory)
    configs = plan.configs
    flags.explain_cpu_fallback(arguments.step.device)
    if arguments.fast:
        flags.explain_fast(configs)
    if arguments.dry_run:
        machines, curves = _machines(arguments), _curves(arguments, directory)
        if curves is None and arguments.cluster is None:
            print_aside(
                "note: no times are predicted, as `cs336 ceilings` has not measured this device"
            )
        elif curves is not None:
            for note, is_true in (
                (SHIPPED, curves.is_shipped),
                (DOUBTED_FORECAST, curves.is_in_doubt),
            ):
                if is_true:
                    print_aside(f"note: {note}")
        _print_plan(plan, directory, curves)
        if arguments.cluster is not None:
            _print_machines(machines, arguments.device())
        return FAILED if machines and all(machine.refused for machine in machines) else OK
    for config in plan.too_large:
        print_aside(f"{config.label} {_outlook(config)}")
    has_profiler = True
    try:
        if arguments.profiler is Profiler.NSYS:
            find_nsys()
    except NsysError as missing:
        print_aside(f"error: no profile: {missing}. The times are measured all the same.")
        configs, has_profiler = (
            tuple(config for config in configs if config.profiler is Profiler.NONE),
            False,
        )
    status = measure_all(configs, directory, arguments.measuring, _elsewhere(arguments))
    return status if has_profiler or status != OK else FAILED


def _curves(arguments: SweepArguments, directory: Path) -> Curves | None:
    """The ceilings of the device that measures the runs; None without any."""
    if arguments.require_device is not None:
        names = [
            name for device in devices_called(arguments.require_device) for name in device.names
        ]
    elif arguments.cluster is not None:
        names = []
    elif arguments.device() is Device.CPU:
        names = [cpu_name()]
    else:
        names = [gpu.name for gpu in visible_gpus()[:1]]
    ceilings = load_ceilings_or_warn(ceilings_beside(directory))
    return next((found for name in names if (found := ceilings.curves(name)) is not None), None)


def _print_plan(plan: Plan, directory: Path, curves: Curves | None) -> None:
    doubt = f" {DOUBT}" if curves is not None and curves.is_in_doubt else ""
    for config in plan.configs:
        is_slowed = config.profiler is not Profiler.NONE or config in plan.too_large
        time = None if curves is None or is_slowed else predicted_time(config, curves)
        step = (
            "" if time is None else f", predicted step {significant(1e3 * time.step_s)} ms{doubt}"
        )
        print(
            f"{config.key}: {config.label}, {config.warmup_steps} + {config.measured_steps} "
            f"steps{step}{_predicted(config)}"
        )
    for config in plan.too_large:
        print(f"will not fit: {config.label} {_outlook(config)}")
    print_line(f"{counted(len(plan.configs), 'run')} into {directory}")


def _outlook(config: RunConfig) -> str:
    """What becomes of a run that will not fit: a GPU fails at once, and a machine would hardly
    answer any more.
    """
    if (lacking := lacking_memory(config)) is not None:
        return f"is not run, and gets a row that says so: it {lacking}"
    return f"will not fit on this GPU, and comes last{_predicted(config)}"


def _predicted(config: RunConfig) -> str:
    """The predicted peak of memory in words; that of `--fast` is in closed form, without the
    allocator's rounding.
    """
    peak_bytes, about = predicted_peak_bytes(config), ""
    is_fast = (
        config.fused_blocks
        and config.fused_loss
        and config.mode in (Mode.FORWARD_BACKWARD, Mode.TRAIN)
    )
    if peak_bytes is None and is_fast:
        peak_bytes, about = fast_peak_bytes(config), "about "
    return "" if peak_bytes is None else f", predicted peak {about}{peak_bytes / 2**30:.1f} GiB"


def _check_ray() -> None:
    """Raise UsageError, which says what to install, where Ray is missing; to import it would
    take seconds.
    """
    if importlib.util.find_spec("ray") is None:
        raise UsageError('--cluster needs Ray: pip install "cs336-systems-benchmark[cluster]"')


def _elsewhere(arguments: SweepArguments) -> Callable[..., "Outcome"] | None:
    """The function that measures on a cluster, if the user asked for one."""
    if arguments.cluster is None:
        return None
    _check_ray()
    from ..sweep.cluster import sweep_on_cluster

    return functools.partial(
        sweep_on_cluster,
        address=arguments.cluster,
        require_device=arguments.require_device,
        wait_nodes_s=arguments.wait_nodes_s,
    )


def _machines(arguments: SweepArguments) -> list["Machine"]:
    """The machines of the cluster, and which of them a sweep that begins now would leave out."""
    if arguments.cluster is None:
        return []
    _check_ray()
    from ..sweep.cluster import Needs, connected, look

    with StatusLine() as status, connected(arguments.cluster):
        status("asking the machines of the cluster")
        needs = Needs(require_device=arguments.require_device, nsys=arguments.nsys)
        return look(arguments.device(), needs, allow_mixed=arguments.measuring.allow_mixed)[0]


def _print_machines(machines: Sequence["Machine"], device: Device) -> None:
    for machine in machines:
        node = machine.node
        what = f"{machine.count:g} {'GPUs' if device is Device.CUDA else 'cores'}"
        has = f", {node.identity.device_name}, PyTorch {node.identity.torch}" if node else ""
        use = "used" if machine.refused is None else f"not used: {machine.refused}"
        print_line(f"{machine.host} ({machine.address}), {what}{has}: {use}")
    at_once = sum(machine.runs_at_once(device) for machine in machines)
    what = "a GPU for each rank" if device is Device.CUDA else "a machine for each run"
    print(
        f"{counted(len(machines), 'machine')}, {counted(at_once, 'rank')} at a time ({what}); Ray "
        "places the runs"
    )


def measure_all(
    configs: Sequence[RunConfig],
    directory: Path,
    measuring: flags.MeasuringArguments,
    elsewhere: Callable[..., "Outcome"] | None = None,
    show: Callable[[Sequence[RunRecord], Path, StatusLine], None] | None = None,
    names: Mapping[RunConfig, str] | None = None,
    begin: Callable[[], object] = lambda: None,
) -> int:
    """Run the configurations that have no result yet, and `show` what came of all, as
    `show_results` does.

    `elsewhere` measures them on other machines in place of `run_sweep`. `names` are shown while
    they run. `begin` is called first, once no other process writes into the directory.
    """
    if is_under_nsys():
        raise UsageError(
            "a sweep under nsys would take its times for those of plain runs: leave nsys out, and "
            "use --nsys instead"
        )
    from ..sweep.run import run_sweep

    if elsewhere is None:
        note_unused_gpus(configs)
    first = IMPORTING if elsewhere is None else "connecting to the cluster"
    with StatusLine(names, first) as status, writing(directory):
        begin()
        outcome = (elsewhere or run_sweep)(
            configs,
            directory,
            status,
            timeout_s=measuring.timeout_s,
            fresh=measuring.fresh,
            allow_mixed=measuring.allow_mixed,
        )
        (show or show_results)(outcome.records, directory, status)
    if outcome.interrupted:
        print_last("interrupted: the same command goes on from here")
        return INTERRUPTED
    wanted = {config.key for config in configs}
    return status_of(
        [record for record in outcome.records if record.key in wanted], outcome.unexplained
    )


def show_results(records: Sequence[RunRecord], directory: Path, status: StatusLine) -> None:
    """Write tables, plots and page of the sweep in the directory, and print the tables."""
    status("reading records and profiles")
    from ..report.page.chapters import Directory, write_page_of
    from ..report.results import Results
    from ..report.terminal import print_sweep

    results = Results.load(records, directory, load_ceilings_or_warn(ceilings_beside(directory)))
    write_results(results, directory, status)
    page = write_page_of(Directory(path=directory, sweep=results), status)[0] if records else None
    status.end()
    print_sweep(results.tables(), records, directory)
    if page is not None:
        print_line(f"page: {page}")
    print_profile_paths([record.subject for record in records], directory / "runs")


def write_results(results: "Results", directory: Path, status: StatusLine) -> None:
    """Write the tables and pictures of the sweep into its directory.

    Tables of profiles that would lose runs, which cannot be explained any more, stay as they are,
    with a warning.
    """
    if not all(
        raw_profile_path(config, directory / "runs").is_file() for config in results.without_profile
    ):
        what = "the tables of profiles stay as they were; --fresh measures these runs again"
        print_aside(f"warning: {directory}: {results.lost}, and {what}")
        results = replace(results, kernels=(), memory=())
    results.write(directory, status)


def note_unused_gpus(configs: Sequence[RunConfig]) -> None:
    """Say on standard error which visible GPUs a sweep of these does not use, and what may put
    its times in doubt.
    """
    from ..sweep.run import gpus_left_out

    flags.look_at_machine(configs[0].device if configs else Device.CPU)

    for gpu in gpus_left_out(configs):
        print_aside(
            f"note: GPU {gpu.index} ({gpu.name}) is left out: it is of another kind than the "
            "first visible one; choose with CUDA_VISIBLE_DEVICES"
        )
