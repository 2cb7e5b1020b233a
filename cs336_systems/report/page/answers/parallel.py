"""Answers about several processes."""

from cs336_systems.config import Device
from cs336_systems.report.columns import Column, Row
from cs336_systems.report.numbers import GIGA, MIB, significant
from cs336_systems.report.page.answers.answer import Answer, Material
from cs336_systems.report.page.answers.commands import command_for
from cs336_systems.report.sections.memory.words import size
from cs336_systems.report.table import make_table

PROCESSES = (2, 4, 6)
BACKENDS = {"gloo": Device.CPU, "NCCL": Device.CUDA}


def all_reduce(material: Material) -> Answer | None:
    """Times and rates of all-reduces by the size of the tensor."""
    studies = [(directory, study) for directory, study in material.collection.ceilings.items() if study.reductions]
    if not studies:
        return None
    directory, study = max(studies, key=lambda pair: (pair[1].grid.device is Device.CUDA, len(pair[1].reductions)))
    rows: list[Row] = [
        {
            "num_bytes": cell.num_bytes,
            "world_size": cell.world_size,
            "time_s": cell.timing.time_s,
            "bus": cell.bus_bytes_per_s,
        }
        for cell in study.reductions
    ]
    columns = [
        Column("tensor", "MiB", key="num_bytes", scale=1 / MIB),
        Column("processes", key="world_size", write=str),
        Column("time", "ms", key="time_s", scale=1e3),
        Column("on the bus", "GB/s", key="bus", scale=1 / GIGA),
    ]
    timed = [row for row in rows if row["bus"]]
    said = [
        f"{significant(row['time_s'] * 1e3, 3)} ms for {size(row['num_bytes'])} "
        f"({significant(row['bus'] / GIGA, 3)} GB/s on the bus)"
        for row in timed
        if row in (timed[0], timed[-1])
    ]
    sentences = [
        f"An all-reduce among {study.reductions[0].world_size} processes takes {' and '.join(said)}.",
        "Small tensors take the time of starting a transfer, whatever their size; large ones that of their bytes.",
    ]
    there = {(study.grid.device, cell.world_size) for _, study in studies for cell in study.reductions}
    missing = {
        name: [str(count) for count in PROCESSES if (device, count) not in there] for name, device in BACKENDS.items()
    }
    lacking = [f"{', '.join(counts)} processes with {name}" for name, counts in missing.items() if counts]
    each = " (a study for each number of processes, with --device cpu for gloo)" if lacking else ""
    return Answer(
        sentences=sentences,
        tables=[make_table("All-reduce by the size of the tensor", columns, rows)],
        places=[(directory, "all_reduce")],
        commands=[command_for(material.collection, directory)],
        conditions=f"{study.device_name}, fp32",
        lacking=f"{' and '.join(lacking)}{each}",
    )
