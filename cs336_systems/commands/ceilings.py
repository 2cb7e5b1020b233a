"""`cs336 ceilings`: what this machine reaches at its best, compared with its data sheet."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cs336_systems.commands.flags import (
    checked_name,
    device_word,
    resolve_device,
    unset,
    value_or,
)
from cs336_systems.commands.study import StudyArguments, with_grid
from cs336_systems.config import SIZES, Device
from cs336_systems.measure.nvml import visible_gpus
from cs336_systems.model.fast.choose import ALIGNMENT, NICE_VOCABULARY
from cs336_systems.studies.ceilings_records import (
    PADDED,
    CeilingsGrid,
    Shape,
)

GPU_SIZES, CPU_SIZES = (256, 512, 1024, 2048, 4096, 8192, 16384), (64, 128, 256, 512, 1024)
GPU_PRESETS, CPU_PRESETS = ("small", "medium", "large", "xl", "2.7B", "gpt2"), ("tiny",)
GPU_MEMORY_MIB, CPU_MEMORY_MIB = (1, 4, 16, 64, 256, 1024, 4096), (1, 16, 64, 128)
BATCH_SIZE = 4
MIB = 2**20


@with_grid
class CeilingsArguments(StudyArguments):
    """Measure what this machine reaches: matrix products by precision and size, memory, launches (also those of a
    training step), and collectives among several GPUs (--device cpu --world-size 6: among processes, over gloo).

    Results go to OUTPUT/ceilings/NAME/, as JSON with every raw time, tables, plots and index.html; other commands take
    them for the measured ceilings of this device.
    """

    GRID, FOLDER = CeilingsGrid, "ceilings"
    UNFINISHED = "unfinished.json"  # which forecasts do not take for the ceilings; renamed to ceilings.json, it is one
    sizes: Annotated[tuple[int, ...] | None, unset("INT [INT ...]", "256 to 16384 on a GPU, 64 to 1024 on a CPU")] = (
        None
    )
    """Sides of square matrices."""
    presets: Annotated[
        tuple[str, ...] | None, unset("[SIZE ...]", "small medium large xl 2.7B gpt2 on a GPU, tiny on a CPU")
    ] = None
    """Model sizes whose layer shapes are measured: the first feed-forward matrix product (at batch 4 and the size's
    context) and, if the vocabulary is no multiple of 8, the LM head with and without padding."""
    memory_mib: Annotated[
        tuple[int, ...] | None, unset("INT [INT ...]", "1 to 4096 on a GPU, 1 16 64 128 on a CPU")
    ] = None
    """What a copy, a sum and an AdamW step move; with some smaller ones, also the tensors of
    collectives (MiB). The largest counts."""
    step_presets: Annotated[tuple[str, ...] | None, unset("[SIZE ...]", "none on a GPU, tiny on a CPU")] = None
    """Model sizes of whose training steps the matrices of every kernel are measured too, with passes over memory as
    steps make them: what makes the forecast of times exact for these steps."""
    name: Annotated[str | None, unset("NAME", "the device's")] = None
    """Name of the directory."""

    def grid(self) -> CeilingsGrid:  # type: ignore[override] # it chooses all fields itself
        """The grid that the flags describe; raise ValueError for flags that describe none."""
        on_gpu, num_gpus = resolve_device(self.device) is Device.CUDA, len(visible_gpus())
        sizes = value_or(self.sizes, GPU_SIZES if on_gpu else CPU_SIZES)
        squares = tuple(Shape(rows=side, inner=side, columns=side) for side in sizes)
        layers = layer_shapes(value_or(self.presets, GPU_PRESETS if on_gpu else CPU_PRESETS))
        memory_mib = value_or(self.memory_mib, GPU_MEMORY_MIB if on_gpu else CPU_MEMORY_MIB)
        if on_gpu and self.world_size is not None and self.world_size > num_gpus:
            raise ValueError(f"--world-size {self.world_size} needs as many GPUs, this process sees {num_gpus}")
        grid: CeilingsGrid = super().grid(
            shapes=(*squares, *layers),
            stream_bytes=tuple(size * MIB for size in memory_mib),
            world_size=value_or(self.world_size, num_gpus if on_gpu else 1),
            step_presets=value_or(self.step_presets, () if on_gpu else CPU_PRESETS) or None,
        )
        return grid

    def directory(self) -> Path:
        """Where the results go; raise ValueError for a name that is no plain directory name."""
        name = checked_name(self.name) if self.name else device_word(resolve_device(self.device))
        return self.output / self.FOLDER / name


def layer_shapes(presets: Sequence[str]) -> tuple[Shape, ...]:
    """The first feed-forward matmul of each preset, and its LM head if the vocabulary is not aligned.

    Raises ValueError for an unknown preset.
    """
    if unknown := [name for name in presets if name not in SIZES]:
        raise ValueError(f"unknown preset {unknown[0]!r}. Presets: {', '.join(SIZES)}")
    shapes = []
    for name in dict.fromkeys(presets):
        model = SIZES[name]
        tokens = BATCH_SIZE * model.context_length
        shapes.append(Shape(rows=tokens, inner=model.d_model, columns=model.d_ff, name=f"{name} feed-forward"))
        if model.vocab_size % ALIGNMENT:
            head = Shape(rows=tokens, inner=model.d_model, columns=model.vocab_size, name=f"{name} head")
            padded = -(-model.vocab_size // NICE_VOCABULARY) * NICE_VOCABULARY
            shapes += [head, Shape(rows=tokens, inner=model.d_model, columns=padded, name=f"{name} head{PADDED}")]
    return tuple(shapes)


def run(arguments: CeilingsArguments) -> int:
    """Measure the grid; print the tables, and write them with the record and the plots."""
    return arguments.run()
