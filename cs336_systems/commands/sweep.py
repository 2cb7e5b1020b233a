"""`benchmark_sweep.py`: a grid of configurations, each in a fresh process, and its tables and
plots.
"""

import functools
import hashlib
import importlib.util
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..analysis.compare import interleave
from ..analysis.kernels import NsysError, find_nsys
from ..config import USED_WITH, Device, Parallel, Precision, Profiler
from ..costs.curves import Curves
from ..costs.hardware import devices_called
from ..measure.environment import cpu_name, host_memory_bytes
from ..measure.nvml import usable_gpu_bytes, visible_gpus
from ..report.progress import StatusLine
from ..report.words import DOUBTED_FORECAST, SHIPPED
from ..settings import flag_of
from ..studies.ceilings_files import ceilings_beside, load_ceilings_or_warn
from ..sweep.store import PROFILE_DIRECTORIES
from ..text import counted, plain_word, print_aside, print_line
from . import flags
from .configure import (
    checked_here,
    chosen_profiler,
    config_of,
    explain_fast,
    one_precision,
    profiled_config,
)
from .machine import device_word, explain_cpu_fallback, resolve_device
from .measuring import measure_all
from .outcome import FAILED, OK, UsageError, checked
from .sweep_plan import Plan, make_plan, outlook, print_plan

if TYPE_CHECKING:
    from ..sweep.cluster.machines import Machine
    from ..sweep.run import Outcome


@flags.with_flags(*flags.FIRST, many=flags.AXES)
class SweepArguments(flags.Flags):
    """Time a grid of sizes, context lengths, modes, precisions and other settings, each run in a
    fresh process, and write tables.

    Every flag that takes several values is an axis of the grid: --compile none default --attention
    naive sdpa makes four runs of each configuration.

    Records, tables (CSV, Markdown) and plots go to OUTPUT/e2e_benchmark/NAME/. The
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
        """Raise ValueError for a setting without values, and for values out of range."""
        for group in (self, self.model, self.step):
            for name in group.settings:
                if getattr(group, name) == ():
                    raise ValueError(f"{flag_of(name)} needs at least one value")
        flags.check_repeats(self.repeats)
        self._check_cluster()

    def _check_cluster(self) -> None:
        """Raise ValueError for flags of a cluster that do not fit together."""
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
        return tuple(one_precision(precision, self.mixed_precision) for precision in asked)

    def plan(self) -> Plan:
        """The grid in the order to run, without duplicates; repeats go forth and back (A B B A)."""
        device = self.device()
        on_gpu = device is Device.CUDA
        given = self.given()
        grid = self._grid(on_gpu)
        once = dict.fromkeys(
            config_of(device, given, point, fast=self.fast, many=True) for point in grid
        )
        # that of other machines is not known
        of_cpus = host_memory_bytes() if self.cluster is None else None
        memory_bytes = usable_gpu_bytes() if on_gpu else of_cpus
        plan = make_plan(list(once), memory_bytes, of_users=self.dry_run)
        order = interleave(len(plan.configs), self.repeats)
        runs = []
        for index, repeat in order:
            plain = replace(plan.configs[index], repeat=repeat)
            runs.append(plain)
            if self.profiler is not Profiler.NONE and repeat == 0:
                runs.append(profiled_config(plain, self.profiler, self.memory_first_step))
        if self.cluster is None:
            runs = list(map(checked_here, runs))
        return replace(plan, configs=tuple(runs))

    def device(self) -> Device:
        """The device to measure on; with --cluster, a device named by --device need not be in
        this machine.
        """
        if self.cluster is not None and self.step.device == "cuda":
            return Device.CUDA
        return resolve_device(self.step.device)

    @property
    def profiler(self) -> Profiler:
        """The profiler of the additional run of each configuration; raise ValueError if several
        are asked for.
        """
        return chosen_profiler(self)

    def _axes(self, on_gpu: bool) -> dict[str, tuple[Any, ...]]:
        """The values of each axis of the grid by the name of its setting, in the order in which
        they are varied.
        """
        values: dict[str, Any] = {}
        for name in flags.AXES:
            usual = flags.SETTING_FIELDS[name][1].by_device
            if usual is not None:
                values[name] = usual.gpu_sweep if on_gpu else usual.cpu_sweep
        values |= self.given() | {"precision": self.chosen_precisions}
        for part, (name, (kind, *others)) in USED_WITH.items():
            if part in values and not others and kind not in values.get(name, ()):
                values[name] = (*values.get(name, ()), kind)
        return {name: values[name] for name in flags.AXES if name in values}

    def _grid(self, on_gpu: bool) -> list[dict[str, Any]]:
        """Every combination of the axes' values, by the names of their settings.

        If other ways to share a step are in the grid, `none` gets one rank; alone it is refused
        with several ranks.
        """
        axes = self._axes(on_gpu)
        points = itertools.product(*axes.values())
        grid = [dict(zip(axes, values, strict=True)) for values in points]
        if {*axes["parallel"]} != {Parallel.NONE}:
            for point in grid:
                if point["parallel"] is Parallel.NONE:
                    point["ranks"] = 1
        return grid

    def directory(self) -> Path:
        """Where this sweep's results go; raise ValueError for a name that is no plain directory
        name.
        """
        name = default_name(self) if self.name is None else flags.checked_name(self.name)
        return self.output / PROFILE_DIRECTORIES[self.profiler] / name


def default_name(sweep: SweepArguments) -> str:
    """Modes, precisions, what differs from the defaults, and the device, so that machines do not
    collide.
    """
    device = sweep.device()
    groups = (sweep, sweep.model, sweep.step)
    axes, of_model, of_step = [_differences(group, ("modes", "precisions")) for group in groups]
    precisions = "-".join(dict.fromkeys(sweep.chosen_precisions))
    parts = ["-".join(dict.fromkeys(sweep.modes)), "fast" if sweep.fast else precisions, *axes]
    if sweep.repeats > 1:
        parts.append(f"repeats-{sweep.repeats}")
    parts += [*of_model, *of_step, device_word(device)]
    name = "_".join(plain_word(part) for part in parts)
    if len(name) > flags.MAX_NAME_LENGTH:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        name = f"{name[: flags.MAX_NAME_LENGTH - 9]}_{digest}"
    return name


def _differences(group: flags.Flags, skip: tuple[str, ...]) -> Iterator[str]:
    """The flags whose values are not the defaults, each with its value: `attention-sdpa`."""
    for flag, name in group.settings.items():
        value, (attribute, setting) = getattr(group, flag), flags.SETTING_FIELDS[name]
        if flag in skip or value == getattr(type(group), flag):
            continue
        values = dict.fromkeys(value if isinstance(value, tuple) else (value,))
        if not (setting.chosen_by_fast and [*values] == [attribute.default]):
            yield f"{flag}-{'-'.join(map(str, values))}"


def run(arguments: SweepArguments) -> int:
    """Measure a grid and write its tables and plots."""
    plan, directory = checked(arguments.plan), checked(arguments.directory)
    configs = plan.configs
    explain_cpu_fallback(arguments.step.device)
    if arguments.fast:
        explain_fast(configs)
    if arguments.dry_run:
        return _say_what_would_run(arguments, plan, directory)
    for config in plan.too_large:
        print_aside(f"{config.label} {outlook(config)}")
    least_status = OK
    if arguments.profiler is Profiler.NSYS:
        try:
            find_nsys()
        except NsysError as missing:
            print_aside(f"error: no profile: {missing}. The times are measured all the same.")
            configs = tuple(config for config in configs if config.profiler is Profiler.NONE)
            least_status = FAILED
    return (
        measure_all(configs, directory, arguments.measuring, _elsewhere(arguments)) or least_status
    )


def _say_what_would_run(arguments: SweepArguments, plan: Plan, directory: Path) -> int:
    """Print the plan, and the machines of a cluster; return the exit status, which says whether
    any machine can measure.
    """
    machines = _machines(arguments)
    curves = _curves(arguments, directory)
    if curves is None and arguments.cluster is None:
        print_aside(
            "note: no times are predicted, as `cs336 ceilings` has not measured this device"
        )
    if curves is not None and curves.is_shipped:
        print_aside(f"note: {SHIPPED}")
    if curves is not None and curves.is_in_doubt:
        print_aside(f"note: {DOUBTED_FORECAST}")
    print_plan(plan, directory, curves)
    if arguments.cluster is not None:
        _print_machines(machines, arguments.device())
    are_all_refused = machines and all(machine.refused for machine in machines)
    return FAILED if are_all_refused else OK


def _curves(arguments: SweepArguments, directory: Path) -> Curves | None:
    """The ceilings of the device that measures the runs; None without any."""
    names: list[str] = []
    if arguments.require_device is not None:
        for device in devices_called(arguments.require_device):
            names += device.names
    elif arguments.cluster is not None:
        return None
    elif arguments.device() is Device.CPU:
        names = [cpu_name()]
    else:
        names = [gpu.name for gpu in visible_gpus()[:1]]
    ceilings = load_ceilings_or_warn(ceilings_beside(directory))
    return next(filter(None, map(ceilings.curves, names)), None)


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
    from ..sweep.cluster.driver import sweep_on_cluster

    return functools.partial(
        sweep_on_cluster,
        address=arguments.cluster,
        require_device=arguments.require_device,
        wait_nodes_s=arguments.wait_nodes_s,
    )


def _machines(arguments: SweepArguments) -> list["Machine"]:
    """The machines of the cluster, and which of them a sweep that begins now would leave out;
    none without --cluster.
    """
    if arguments.cluster is None:
        return []
    _check_ray()
    from ..sweep.cluster.connection import connected
    from ..sweep.cluster.machines import look
    from ..sweep.cluster.task import Needs

    with StatusLine() as status, connected(arguments.cluster):
        status("asking the machines of the cluster")
        needs = Needs(require_device=arguments.require_device, nsys=arguments.nsys)
        machines, _ = look(arguments.device(), needs, allow_mixed=arguments.measuring.allow_mixed)
        return machines


def _print_machines(machines: Sequence["Machine"], device: Device) -> None:
    """Print each machine of the cluster, whether it is used, and what runs at a time."""
    units = "GPUs" if device is Device.CUDA else "cores"
    for machine in machines:
        node = machine.node
        what = f"{machine.count:g} {units}"
        has = f", {node.identity.device_name}, PyTorch {node.identity.torch}" if node else ""
        use = "used" if machine.refused is None else f"not used: {machine.refused}"
        print_line(f"{machine.host} ({machine.address}), {what}{has}: {use}")
    at_once = sum(machine.runs_at_once(device) for machine in machines)
    what = "a GPU for each rank" if device is Device.CUDA else "a machine for each run"
    print(
        f"{counted(len(machines), 'machine')}, {counted(at_once, 'rank')} at a time ({what}); Ray "
        "places the runs"
    )
