"""The machines of a cluster: what each has, what is free, and what a sweep would do with it."""

from collections.abc import Mapping
from dataclasses import asdict, fields

from cs336_systems.record import Identity
from cs336_systems.report.columns import Column, Row
from cs336_systems.report.section import Section
from cs336_systems.report.table import known, make_table
from cs336_systems.sweep.cluster.nodes import Look, Machine
from cs336_systems.text import counted

_COLUMNS = (
    Column("machine", key="host", numeric=False, write=str, about="Name of the machine."),
    Column("address", key="address", numeric=False, write=str, drop_order=2, about="Its address in the cluster."),
    Column("device", key="device", numeric=False, about="What would be measured.",
           text=lambda row: _device(row)),
    Column("free", key="free", about="GPUs that no job has reserved; on a CPU, its cores.",
           text=lambda row: f"{row['free']:g} of {row['count']:g}"),
    Column("PyTorch", key="torch", numeric=False, write=str, about="Version of PyTorch."),
    Column("driver", key="driver", numeric=False, write=str, drop_order=1, about="Version of NVIDIA's driver."),
    Column("nsys", key="nsys", numeric=False, drop_order=4, about="Whether nsys is on its PATH, which --nsys needs.",
           text=lambda row: {True: "yes", False: "no", None: ""}[row["nsys"]]),
    Column("code", key="code", numeric=False, write=str, drop_order=3, about="Digest of the measuring code."),
    Column("in a sweep", key="refused", numeric=False, about="Whether a sweep uses it, or why not.",
           text=lambda row: row["refused"] or "used"),
)  # fmt: skip


def cluster_section(look: Look, refused: Mapping[str, str | None]) -> Section:
    """A row for each machine; `refused` says by its name why a sweep leaves it out."""
    rows = [_row(machine, refused[machine.name]) for machine in look.machines]
    used = [row for row in rows if row["refused"] is None]
    slots = counted(sum(row["slots"] for row in used), "run") if used else "no run"
    notes = [f"A sweep uses {len(used)} of {counted(len(rows), 'machine')}: {slots} at a time."]
    table = make_table(
        "Machines of the cluster", known(_COLUMNS, rows), rows, notes, lambda row: row["refused"] is not None
    )
    return Section(name="cluster", tables=(table,), rows=rows)


def _row(machine: Machine, refused: str | None) -> Row:
    """The values of a machine; those that it does not tell are None."""
    node = machine.node
    return {
        "name": machine.name, "host": machine.host, "address": machine.address, "slots": node.slots if node else 0,
        **(asdict(node.identity) if node else dict.fromkeys(field.name for field in fields(Identity))),
        "nsys": node.has_nsys if node else None,
        "count": machine.count, "free": machine.free, "refused": refused,
    }  # fmt: skip


def _device(row: Row) -> str:
    name = row["device_name"] or ""
    return f"{row['slots']} x {name}" if row["slots"] > 1 else str(name)
