"""What the pictures of steps show, taken from the frame of results; nothing here draws."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import pandas as pd

from cs336_systems.config import Precision
from cs336_systems.record import Status
from cs336_systems.report.frame import apart_from, numbered, rows_of
from cs336_systems.report.plots.charts import Line, Point
from cs336_systems.report.words import status_text

AXES = ("size", "d_model", "d_ff", "num_layers", "num_heads", "context_length")
"""Settings that run along the axes and the lines of a picture; all else is equal within one picture."""
Row: TypeAlias = dict[str, Any]


def named_rows(frame: pd.DataFrame) -> list[Row]:
    """The rows of results, each with the `name` of its size, and how it ended as `failure` if it failed."""
    return [
        row | {"name": name, "failure": None if row["status"] == Status.OK else status_text(row["status"])}
        for name, row in zip(size_names(frame), rows_of(frame), strict=True)
    ]


def size_names(frame: pd.DataFrame) -> list[str]:
    """A name for the size of every row: as much of its shape is added as tells shapes of one name apart."""
    shape = ["d_model", "num_layers", "d_ff", "num_heads"]
    varied = frame.groupby("size")[shape].transform("nunique") > 1
    names = []
    for (size, *values), (d_models, layers, d_ffs, heads) in zip(
        frame[["size", *shape]].itertuples(index=False), varied.itertuples(index=False), strict=True
    ):
        d_model, num_layers, d_ff, num_heads = values
        parts = {f"{d_model}x{num_layers}": d_models or layers, f"d_ff {d_ff}": d_ffs, f"{num_heads} heads": heads}
        names.append(" ".join([size, *(part for part, is_needed in parts.items() if is_needed)]))
    return names


def split(frame: pd.DataFrame, *across: str) -> Iterator[pd.DataFrame]:
    """Parts of the frame that agree in all but AXES and `across`, each fit for one picture.

    A failed row that names no device goes to the device of the rest, where there is only one.
    """
    devices = frame["device_name"].dropna().unique()
    named = frame["device_name"].fillna(devices[0]) if len(devices) == 1 else frame["device_name"]
    keys = (
        (None if pd.isna(device) else device, *apart_from(config, *AXES, *across))
        for config, device in zip(frame.index, named, strict=True)
    )
    return (part for _, part in frame.groupby(numbered(keys)))


def line(name: str, rows: Iterable[Row], x: str, value: str, error: str = "") -> Line:
    """The values of one column over another, with their deviations."""
    points = (
        Point(
            x=row[x] if isinstance(row[x], str) else int(row[x]),
            value=row[value],
            error=row[error] if error else None,
            failure=row["failure"],
        )
        for row in rows
    )
    return Line(name=name, points=tuple(points))


def lines(rows: Iterable[Row], by: str, x: str, value: str, error: str = "") -> list[Line]:
    """A line for each text in the column `by`, in the order of the first row of each."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[by], []).append(row)
    return [line(name, own, x, value, error) for name, own in groups.items()]


def speed_up_lines(rows: Iterable[Row], precision: Precision) -> list[Line]:
    """Speed-up over fp32; a failure names the precision that failed.

    Against size, one line per context length; where there are more context lengths than sizes, `x` is the context
    length, an int, and there is one line per size.
    """
    pairs = [
        row | {"failure": _pair_failure(Status(row["fp32_status"]), precision, Status(row["status"]))}
        for row in rows
        if row["precision"] == precision and row["fp32_status"] is not None
    ]
    if len({row["context_length"] for row in pairs}) > len({row["name"] for row in pairs}):
        return lines(pairs, "name", "context_length", "speed_up", "speed_up_std")
    by_context = sorted(pairs, key=lambda row: row["context_length"])
    named = [row | {"context": f"context {row['context_length']}"} for row in by_context]
    return lines(named, "context", "name", "speed_up", "speed_up_std")


def _pair_failure(full: Status, precision: Precision, status: Status) -> str | None:
    if full is status:
        return None if status is Status.OK else f"both {status_text(status)}"
    ends = {Precision.FP32: full, precision: status}
    return ", ".join(f"{which} {status_text(end)}" for which, end in ends.items() if end is not Status.OK)
