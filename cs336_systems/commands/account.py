"""`cs336 account`: the cost of a step, computed from its configuration alone."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ..config import Device, RunConfig
from ..costs.compiled import uncompiled
from ..costs.curves import Curves
from ..costs.hardware import (
    DEVICES,
    DeviceSpec,
    bare_name,
    devices_called,
    find_device,
    is_short_for,
)
from ..costs.networks import links_of
from ..costs.ranks_time import Links
from ..costs.time import has_large_matmuls, prepare_forecasts, require_tapes
from ..costs.traces import one_tracer, own_parameters, why_untraced
from ..measure.nvml import usable_gpu_bytes
from ..report.words import GIB
from ..studies.ceilings_files import (
    FILE_NAME,
    Ceilings,
    ceilings_files,
    data_sheet_curves,
    load_ceilings,
    load_ceilings_or_warn,
)
from ..text import print_aside
from . import flags
from .configure import NamedGpu, checked_factory, make_config, make_fast_config, one_precision
from .machine import first_gpu
from .outcome import OK, UsageError, checked, print_page, show

if TYPE_CHECKING:
    from ..report.section import Section
    from ..report.sections.account import Account

USUAL_CEILINGS = Path("data/ceilings")


@dataclass(frozen=True, kw_only=True)
class ForecastArguments(flags.OutputArguments):
    """Which GPU a forecast is of, and what is known of it."""

    device_name: Annotated[
        str | None, flags.unset("NAME", "this machine's GPU, or the only one of --ceilings")
    ] = None
    """GPU whose time is predicted, such as H100 or 4090; it need not be here."""
    ceilings: Annotated[Path | None, flags.unset("DIR", "data/ceilings, if it is there")] = None
    """Directory of measured ceilings (`cs336 ceilings`), from which steps and collectives have
    times. If all are of one device, that is the GPU, whether it is here or not. Those of an H100
    and an H200 come with the program; a device without any takes its data sheet's rates at stated
    efficiencies.
    """

    def known_ceilings(self) -> Ceilings:
        """The ceilings; raise ValueError for a directory without any, unless it is the usual one.

        Damage is an error if the directory is of one study, otherwise a warning.
        """
        if self.ceilings is not None and not ceilings_files(self.ceilings):
            raise ValueError(
                f"--ceilings {self.ceilings}: no directory with ceilings; `cs336 ceilings` makes "
                "one"
            )
        directory = self.ceilings or USUAL_CEILINGS
        is_one = (directory / FILE_NAME).exists()
        return load_ceilings(directory) if is_one else load_ceilings_or_warn(directory)

    def machine(self, ceilings: Ceilings) -> tuple[str | None, DeviceSpec | None]:
        """The name by which ceilings have the device that is meant, or else its own, and its data
        sheet.

        A name may be short if it fits one device of the ceilings. Without a name this machine's GPU
        is meant; if there is none, or ceilings are asked for, their only device. Both are None if
        neither tells. Raises ValueError for a name that neither ceilings nor a data sheet have.
        """
        name = self.device_name
        known = ceilings.device_names
        gpu = first_gpu()
        if name is not None:
            meant = [device for device in known if device == bare_name(name)]
            for names in (ceilings.measured_names, known):
                if not meant:
                    meant = [device for device in names if is_short_for(name, device)]
        elif self.ceilings is not None or gpu is None:
            meant = ceilings.measured_names
        else:
            meant = [device for device in known if device == bare_name(gpu.name)]
        if len(meant) == 1:
            return meant[0], find_device(meant[0])
        sheet = device_meant(name)
        if sheet is None:
            return None, None
        in_ceilings = [device for device in sheet.names if device in known]
        return (in_ceilings or sheet.names)[0], sheet


@flags.with_flags(
    "size",
    "context_length",
    "batch_size",
    "accumulate_steps",
    "mode",
    "precision",
    "optimizer",
    "fp8",
    "compile",
    "bf16_moments",
    "bf16_stream",
    "checkpoint_blocks",
    "parallel",
    "ranks",
    "shard_optimizer",
    "loss",
    "module_depth",
    rules={"size": "small", "context_length": "512, and 1024 for gpt2"},
)
class AccountArguments(flags.Flags, ForecastArguments):
    """Say what a training step costs without running it: parameters, bytes and FLOPs by part of the
    model, the peak of memory by what it holds, and the time.

    The numbers are those of a step on a GPU: eager, with --fast, or with --compile default. No GPU
    is needed, and torch only for steps whose trace does not come with the program. Memory is
    predicted for NVIDIA Hopper: other GPUs need up to 48 MiB less. With --parallel the numbers are
    those of the rank that keeps most.

    With --compile default, inductor compiles a few blocks for a GPU that is not there, which takes
    about half a minute. FLOPs and bytes by part stay those of the eager step. With --fit each batch
    that is tried is compiled, which takes minutes the first time, and the longest context is not
    searched.
    """

    mixed_precision: flags.Switch = False
    """Short for --precision bf16."""
    fast: flags.Switch = False
    """Forecast the fastest known way to compute the same step, in bf16; with --fp8, linear layers
    of blocks in fp8. Blocks are checkpointed only if asked for.
    """
    model: flags.Flat[flags.ModelArguments] = field(default_factory=flags.ModelArguments)
    fit: flags.Switch = False
    """Say the largest batch and the longest context that fit; of a compiled step only the batch."""
    memory_gib: Annotated[float | None, flags.unset("GIB", "that of the GPU")] = None
    """Memory that programs can use, for --fit (GiB). The default is that of the smallest GPU here,
    or of the data sheet of a GPU that is not here.
    """
    details: flags.Switch = False
    """Show all tables: FLOPs and bytes by part, collectives, time by phase, checkpoints, and what
    the peak consists of.
    """
    top: int = 12
    """Rows to show of what the peak consists of."""
    json: flags.Switch = False
    """Print JSON instead of tables."""

    def config(self, gpu_name: str | None = None) -> RunConfig:
        """The configuration of these flags on the GPU of this name; raise ValueError for flags
        that contradict each other.
        """
        precision = one_precision(self.precision, self.mixed_precision)
        given = self.given()
        settings = {"size": "small"} | given | {"precision": precision}
        if self.fast:
            asked = {name: settings[name] for name in given}
            device = None if gpu_name is None else find_device(gpu_name)
            memory_bytes = None if device is None else device.memory_bytes
            config = make_fast_config(
                Device.CUDA, asked, NamedGpu(gpu_name, memory_bytes), **settings
            )
        else:
            config = make_config(Device.CUDA, **settings)
        return checked_factory(config, given)

    def check(self) -> None:
        """Raise ValueError for values out of range and for flags that do not go together."""
        flags.check_top(self.top)
        if self.memory_gib is not None and not 0 < self.memory_gib < 1e6:
            raise ValueError(
                f"--memory-gib must be positive and below a million, got {self.memory_gib}"
            )
        if self.memory_gib is not None and not self.fit:
            raise ValueError("--memory-gib says what the step is to fit into: add --fit")

    def memory_bytes(self, name: str | None, device: DeviceSpec | None) -> int | None:
        """Memory that the step must fit, by default the data sheet's of a device that is named, or
        that is not here.

        None without --fit. Raises ValueError if no size is given or known.
        """
        if not self.fit:
            return None
        if self.memory_gib is not None:
            return round(self.memory_gib * GIB)
        gpu = first_gpu()
        is_here = name is None
        if gpu is not None:
            is_here |= bare_name(gpu.name) == name or find_device(gpu.name) is device is not None
        if self.device_name is not None or not is_here:
            if device is None or device.memory_bytes is None:
                named = self.device_name or name
                raise ValueError(
                    f"--fit needs --memory-gib here: no data sheet says how much {named} has"
                )
            return device.memory_bytes
        if (usable_bytes := usable_gpu_bytes()) is None:
            raise ValueError(
                "--fit needs --memory-gib or --device-name here: this machine has no NVIDIA GPU "
                "that tells how much memory it has"
            )
        return usable_bytes


def device_meant(name: str | None) -> DeviceSpec | None:
    """The data sheet of the device of this name, which may be short; by default of this machine's
    GPU, None if unknown.

    Raises ValueError for a name that is unknown or ambiguous.
    """
    if name is None:
        gpu = first_gpu()
        return None if gpu is None else find_device(gpu.name)
    devices = devices_called(name)
    if len(devices) == 1:
        return devices[0]
    if devices:
        names = ", ".join(", ".join(device.names) for device in devices)
        raise ValueError(
            f"GPU {name[:40]!r} may be {names}, which differ in their data sheets: give one"
        )
    known = [*chain.from_iterable(device.names for device in DEVICES)]
    alike = [other for other in known if name and name.casefold() in other.casefold()]
    close = alike or difflib.get_close_matches(name[:40], known, n=3) or known
    raise ValueError(f"GPU {name[:40]!r} is not known; did you mean one of {', '.join(close)}?")


def curves_meant(
    name: str | None, device: DeviceSpec | None, config: RunConfig, ceilings: Ceilings
) -> Curves | None:
    """The device's measured times, if they tell those of such a step, or else what its data
    sheet promises.
    """
    measured = None if name is None else ceilings.curves(name)
    # the ceilings of a CPU tell nothing of a GPU's step
    if measured is not None and not measured.on_host and has_large_matmuls(config, measured):
        return measured
    return None if device is None else data_sheet_curves(device)


def _links(
    config: RunConfig, name: str | None, device: DeviceSpec | None, ceilings: Ceilings
) -> tuple[Links | None, str]:
    """How the ranks of a step are joined, and in words what says so, or why nothing does."""
    if name is None or not config.is_shared:
        return None, ""
    try:
        return links_of(name, device, ceilings.collectives(name), gpus=config.ranks)
    except ValueError as error:
        return None, str(error)


@one_tracer()
def run(arguments: AccountArguments) -> int:
    """Print the tables, and write them if --output is given."""
    checked(arguments.check)
    ceilings = checked(arguments.known_ceilings)
    name, device = checked(arguments.machine, ceilings)
    config = checked(arguments.config, name)
    memory_bytes = checked(arguments.memory_bytes, name, device)
    require_tapes(config)
    if config.model_factory is not None:
        _trace_own_model(config)
    from ..files import encode_json
    from ..report.formats import texts_of, write_files
    from ..report.sections.account import (
        account_answer,
        account_json,
        account_section,
        summary_tables,
    )

    account = _account(config, name, device, memory_bytes, ceilings)
    section = account_section(account, arguments.top)
    if arguments.output is not None:
        write_files(texts_of(section), arguments.output, arguments.formats)
    sentences = [*account_answer(account)]
    tables = section.tables if arguments.details else summary_tables(account, section)
    json = encode_json(account_json(account)) if arguments.json else None
    show(tables, arguments.output, sentences, json=json)
    if name is None and ceilings.device_names:
        _suggest_devices(ceilings.device_names)
    if not arguments.json:
        _print_page(arguments.output, config.label, sentences, section)
    return OK


def _account(
    config: RunConfig,
    name: str | None,
    device: DeviceSpec | None,
    memory_bytes: int | None,
    ceilings: Ceilings,
) -> "Account":
    """The account of a step on the device of this name, with what ceilings say of its times."""
    from ..report.sections.account import Account

    links, link_source = _links(config, name, device, ceilings)
    return Account(
        config=config,
        device=device,
        memory_bytes=memory_bytes,
        collective_times={} if name is None else ceilings.collectives(name).get(config.ranks, {}),
        curves=curves_meant(name, device, config, ceilings),
        device_name=name,
        links=links,
        link_source=link_source,
    )


def _trace_own_model(config: RunConfig) -> None:
    """Trace a step of the user's own model; raise UsageError if that shows no parameters."""
    print_aside(f"tracing a step of {config.model_factory} without data")
    prepare_forecasts([uncompiled(config)], of_users=True)
    if not own_parameters(config):
        flag = f"--model {config.model_factory}: "
        why = why_untraced(config) or "needed a factory of a model, and this one makes a step"
        raise UsageError(flag + why.removeprefix(flag))


def _suggest_devices(device_names: Iterable[str]) -> None:
    """Say that no times are predicted, and which names of GPUs would give some."""
    choices = " or ".join(f'--device-name "{known}"' for known in device_names)
    print_aside(
        "no times are predicted, as no GPU is named and this machine has none that is "
        f"known; try {choices}"
    )


def _print_page(
    directory: Path | None, label: str, sentences: Sequence[str], section: "Section"
) -> None:
    """Write the page of the account, by default in a directory of its own, and print its path."""
    from ..report.page.forecasts import folder_of, write_forecast_page

    directory = directory or folder_of("accounts", label)
    title = f"What a step costs: {label}"
    print_page(partial(write_forecast_page, title, sentences, section, directory))
