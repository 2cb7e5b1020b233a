"""`cs336 attention`, `fusion`, `ceilings` and `precision`, and what they share: flags, files and
printing.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from ..config import SIZES, Device
from ..costs.allocator import MIB
from ..files import encode_json, write_atomically
from ..measure.inputs import check_factory, source_of
from ..measure.nvml import visible_gpus
from ..model.fast.choose import MATMUL_MULTIPLE, NICE_VOCABULARY
from ..report.progress import StatusLine
from ..settings import declared
from ..studies.ceilings_records import PADDED, CeilingsGrid, check_presets
from ..studies.ceilings_rows import Shape
from ..studies.operators import AttentionGrid, FusionGrid
from ..sweep.store import make_writable, time_stamp, writing
from ..text import print_aside, print_line
from ..torch_needed import require_torch
from . import flags
from .machine import (
    DeviceChoice,
    DeviceFlag,
    device_word,
    explain_cpu_fallback,
    look_at_machine,
    resolve_device,
)
from .outcome import FAILED, OK, checked

if TYPE_CHECKING:
    from ..report.results import Study
    from ..studies.records import PrecisionStudy

ArgumentsT = TypeVar("ArgumentsT", bound="StudyArguments")
StudyT = TypeVar("StudyT", bound="Study")


@dataclass(frozen=True, kw_only=True)
class StudyArguments(flags.Flags, flags.KeepingArguments):
    """Flags that every study has."""

    GRID: ClassVar[type]
    """Class of the grid, whose declared settings become flags."""
    FOLDER: ClassVar[str]
    """Directory of all studies of this kind, below the output directory."""
    MOST_PRINTED: ClassVar[int | None] = None
    """Most tables that are printed; the page has all."""
    device: DeviceFlag = "auto"
    seed: int = 0
    """Seed of the inputs."""
    name: Annotated[str | None, flags.unset("NAME", "precisions and device")] = None
    """Name of the directory."""
    output: Path = Path("data")
    """Directory for results."""

    def grid(self, **others: Any) -> Any:  # noqa: ANN401 (each study has its own)
        """The grid that the flags mean, with other fields; raise ValueError if there is no such
        grid.
        """
        device = resolve_device(self.device)
        defaults = {}
        for attribute, setting in declared(self.GRID):
            if usual := setting.by_device:
                defaults[attribute.name] = usual.gpu if device is Device.CUDA else usual.cpu
        return self.GRID(**defaults | self.given() | others | {"device": device, "seed": self.seed})

    def directory(self) -> Path:
        """Where the results go; raise ValueError for a name that is no plain directory name."""
        return self.output / self.FOLDER / flags.study_name(self.name, self.precisions, self.device)

    def run(self) -> int:
        """Measure the cells that have no result yet, keeping each, and write the results and
        print them.
        """
        require_torch("measuring")
        explain_cpu_fallback(self.device)
        grid, directory = checked(self.grid), checked(self.directory)
        look_at_machine(resolve_device(self.device))
        record = directory / f"{self.FOLDER}.json"

        def measure(status: StatusLine) -> Any:  # noqa: ANN401
            """Measure the cells that are not measured yet, and write the study after each; return
            the study.
            """
            from ..report.results import STUDIES
            from ..studies.runner import resume, run_study

            folder = make_writable(directory / "cells")
            cells = resume(
                grid, STUDIES[self.FOLDER], folder, fresh=self.fresh, allow_mixed=self.allow_mixed
            )
            keep_earlier(record, cells.study() if cells.measured else None)

            def on_progress() -> None:
                """Write the cells that have been measured so far, so that an interrupted study can
                be reported.
                """
                # forecasts would take the best so far for the ceilings
                if self.FOLDER != "ceilings":
                    write_atomically(record, encode_json(cells.study()))

            return run_study(grid, status, cells, on_progress)

        with writing(directory):
            study = show_study(measure, directory, self.formats, self.MOST_PRINTED)
        return OK if all(status.is_result for status in study.statuses) else FAILED


def keep_earlier(present: Path, study: object) -> None:
    """Copy the study that is in the file, if it is another, to one beside it that is named after
    the time; say so.
    """
    if not present.is_file():
        return
    earlier = present.read_bytes()
    if earlier == encode_json(study):
        return
    copies = present.parent.glob(f"{present.stem}-before-*{present.suffix}")
    if all(copy.read_bytes() != earlier for copy in copies):
        kept = present.with_name(f"{present.stem}-before-{time_stamp()}{present.suffix}")
        write_atomically(kept, earlier)
        print_aside(f"the earlier {present.name} is kept as {kept}")


def with_grid(kind: type[ArgumentsT]) -> type[ArgumentsT]:
    """Make a class of arguments a dataclass with a flag for each setting of its grid."""
    return flags.with_flags_of(kind.GRID)(kind)


@with_grid
class AttentionArguments(StudyArguments):
    """Time every implementation of attention alone, over head dimensions and context lengths, and
    say how much memory it holds.

    There is one head, as in the course's exercise. Cells that run out of memory or for which there
    is no kernel have rows of their own. Results go to OUTPUT/attention/NAME/, as JSON with every
    raw time, tables, plots and index.html.

    Your own is added by --own flash:FlashAttention, from flash.py in this directory;
    examples/flex_attention.py of the repository is one. If its error against float64 is over 10
    times that of PyTorch's kernel, it is marked WRONG, its times are in no table, and the exit
    status is 1. If its backward raises NotImplementedError, only forward is timed. The course's
    grid for it:
    --batch-size 1 --causal --precisions bf16 fp32 --d-heads 16 32 64 128 --context-lengths 128 256
    512 1024 2048 4096 8192 16384 32768 65536.
    """

    GRID, FOLDER, MOST_PRINTED = AttentionGrid, "attention", 2

    def grid(self, **others: object) -> AttentionGrid:
        """The grid that the flags mean, with the state of the user's source; ValueError if there
        is no such name.
        """
        grid: AttentionGrid = super().grid(**others)
        if grid.own is None:
            return grid
        check_factory(grid.own, "--own")
        return replace(grid, source=source_of(grid.own))


@with_grid
class FusionArguments(StudyArguments):
    """Show what fusing does to GELU, softmax, RMSNorm and attention: written out, compiled, and
    PyTorch's own.

    For each, forward and backward: kernels launched, bytes moved, time, share of the memory
    bandwidth, error. Results go to OUTPUT/fusion/NAME/, as JSON with every raw time, tables, plots
    and index.html.
    """

    GRID, FOLDER = FusionGrid, "fusion"


USUAL_CEILINGS: Mapping[Device, dict[str, tuple[Any, ...]]] = {
    Device.CUDA: {
        "sizes": (256, 1024, 4096, 8192),
        "presets": ("gpt2",),
        "memory_mib": (1, 4, 16, 64, 256, 1024, 4096),
        "step_presets": (),
        "attention_contexts": (256, 1024, 4096, 16384, 65536),
    },
    Device.CPU: {
        "sizes": (64, 128, 256, 512, 1024),
        "presets": ("tiny",),
        "memory_mib": (1, 16, 64, 128),
        "step_presets": ("tiny",),
        "attention_contexts": (),
    },
}
"""What `cs336 ceilings` measures unless flags say otherwise, by their names."""
LAYER_BATCH_SIZE = 4


@with_grid
class CeilingsArguments(StudyArguments):
    """Measure what this machine reaches: matrix products by precision and size, memory, launches
    (also those of a training step), and collectives among several GPUs.

    Forecasts of other commands use these rates for this device. --device cpu --world-size 6
    measures collectives among processes, over gloo. Results go to OUTPUT/ceilings/NAME/, as JSON
    with every raw time, tables, plots and index.html.
    """

    GRID, FOLDER = CeilingsGrid, "ceilings"
    sizes: Annotated[
        tuple[int, ...] | None,
        flags.unset("INT [INT ...]", "256 to 8192 on a GPU, 64 to 1024 on a CPU"),
    ] = None
    """Sides of square matrices."""
    presets: Annotated[
        tuple[str, ...] | None, flags.unset("[SIZE ...]", "gpt2 on a GPU, tiny on a CPU")
    ] = None
    """Model sizes whose layer shapes are measured: the first feed-forward matrix product (at batch
    4 and the size's context) and, if the vocabulary is no multiple of 8, the LM head with and
    without padding.
    """
    memory_mib: Annotated[
        tuple[int, ...] | None,
        flags.unset("INT [INT ...]", "1 to 4096 on a GPU, 1 16 64 128 on a CPU"),
    ] = None
    """Memory that a copy, a sum and an AdamW step move, and sizes of the tensors of collectives,
    beside some smaller ones (MiB). The largest gives the rate."""
    step_presets: Annotated[
        tuple[str, ...] | None, flags.unset("[SIZE ...]", "none on a GPU, tiny on a CPU")
    ] = None
    """Model sizes whose training steps are measured kernel by kernel: all their matrix products
    and passes over memory. The forecast of the time of these steps is then more exact.
    """
    attention_contexts: Annotated[
        tuple[int, ...] | None,
        flags.unset("[INT ...]", "256 to 65536, by fours, on a GPU, none on a CPU"),
    ] = None
    """Context lengths at which fused attention is measured with few and many heads."""
    name: Annotated[str | None, flags.unset("NAME", "the device's")] = None
    """Name of the directory."""

    def grid(self) -> CeilingsGrid:  # type: ignore[override] # it chooses all fields itself
        """The grid that the flags describe; raise ValueError for flags that describe none."""
        device = resolve_device(self.device)
        most_ranks = len(visible_gpus()) if device is Device.CUDA else 1
        world_size = flags.value_or(self.world_size, most_ranks)
        if device is Device.CUDA and world_size > most_ranks:
            raise ValueError(
                f"--world-size {world_size} needs as many GPUs, this process sees {most_ranks}"
            )
        asked = {
            name: flags.value_or(getattr(self, name), usual)
            for name, usual in USUAL_CEILINGS[device].items()
        }
        squares = tuple(Shape(rows=side, inner=side, columns=side) for side in asked["sizes"])
        grid: CeilingsGrid = super().grid(
            shapes=(*squares, *layer_shapes(asked["presets"])),
            stream_bytes=tuple(size * MIB for size in asked["memory_mib"]),
            world_size=world_size,
            step_presets=asked["step_presets"] or None,
            attention_contexts=asked["attention_contexts"] or None,
        )
        return grid

    def directory(self) -> Path:
        """Where the results go; raise ValueError for a name that is no plain directory name."""
        name = self.name or device_word(resolve_device(self.device))
        return self.output / self.FOLDER / flags.checked_name(name)


def layer_shapes(presets: Sequence[str]) -> tuple[Shape, ...]:
    """The first feed-forward matmul of each preset, and its LM head if the vocabulary is not
    aligned.

    Raises ValueError for an unknown preset.
    """
    check_presets(presets)
    shapes = []
    for name in dict.fromkeys(presets):
        model = SIZES[name]
        widths = {"feed-forward": model.d_ff}
        if model.vocab_size % MATMUL_MULTIPLE:
            padded = math.ceil(model.vocab_size / NICE_VOCABULARY) * NICE_VOCABULARY
            widths |= {"head": model.vocab_size, f"head{PADDED}": padded}
        rows = LAYER_BATCH_SIZE * model.context_length
        for what, width in widths.items():
            shapes.append(
                Shape(rows=rows, inner=model.d_model, columns=width, name=f"{name} {what}")
            )
    return tuple(shapes)


@dataclass(frozen=True, kw_only=True)
class PrecisionArguments(flags.OutputArguments):
    """Show what accumulation, layer norm and autocast do to precision, as observed on this
    machine.
    """

    device: DeviceChoice = "auto"
    """Where to observe autocast; auto is the CPU, and the GPU too where there is one."""

    def devices(self) -> tuple[Device, ...]:
        """Devices to observe; raise ValueError where a GPU is asked for and there is none."""
        chosen = resolve_device(self.device)
        has_both = self.device == "auto" and chosen is Device.CUDA
        return (Device.CPU, Device.CUDA) if has_both else (chosen,)

    def run(self) -> int:
        """Observe sums, layer norm and data types, print them, and write them into the directory
        if one is given.
        """
        require_torch("measuring")
        explain_cpu_fallback(self.device)
        devices = checked(self.devices)
        if self.output is not None:
            self.output.mkdir(parents=True, exist_ok=True)

        def measure(status: StatusLine) -> "PrecisionStudy":
            """Import PyTorch, and run the study of precision on these devices."""
            status("importing PyTorch")
            from ..studies.precision import run_precision_study

            return run_precision_study(devices, status)

        show_study(measure, self.output, self.formats)
        return OK


def run(arguments: StudyArguments | PrecisionArguments) -> int:
    """Run the command that these are the arguments of."""
    return arguments.run()


def show_study(
    measure: Callable[[StatusLine], StudyT],
    directory: Path | None,
    formats: Collection[str],
    most_printed: int | None = None,
) -> StudyT:
    """Measure, showing progress; write the results into the directory, if one is given, tables
    also in `formats`; print `most_printed` of the tables, by default all, and return the results.
    """
    from ..report.page.chapters import write_page_of
    from ..report.page.directory import Directory
    from ..report.results import StudyResults
    from ..report.section import all_tables
    from ..report.terminal import print_table

    with StatusLine() as status:
        study = measure(status)
        results = StudyResults(study)
        if directory is not None:
            status("drawing and writing")
            write_atomically(directory / f"{results.subject}.json", encode_json(study))
            results.write(directory, formats)
            page, _ = write_page_of(Directory(path=directory, study=results), status)
    for table in all_tables(results.sections)[:most_printed]:
        print_table(table, directory)
    if directory is not None:
        print_line(f"results: {directory}")
        print_line(f"page: {page}")
    return study
