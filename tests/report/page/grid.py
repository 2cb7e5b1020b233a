"""The committed grid of 30 runs, worked out again from its JSON."""

import csv
import json
import statistics
from functools import cache
from pathlib import Path

from cs336.config import SIZES

GRID = Path(__file__).parents[3] / "data/published/e2e_benchmark/train"
VOCABULARY = 10_000


@cache
def grid_runs():
    """The JSON of each run by size, context and precision, all as texts."""
    runs = [json.loads(line) for line in (GRID / "runs.jsonl").read_text().splitlines()]
    return {
        (
            r["config"]["size"],
            str(r["config"]["model"]["context_length"]),
            r["config"]["precision"],
        ): r
        for r in runs
    }


@cache
def grid_values():
    """What each heading of the table of steps stands above, for each run of the grid."""
    runs = grid_runs()
    with (GRID / "results.csv").open(newline="") as file:
        rows = {
            (row["size"], row["context_length"], row["precision"]): row
            for row in csv.DictReader(file)
        }
    fp32 = {
        key: next(each["times_s"] for each in run["measurements"] if each["phase"] == "step")
        for key, run in runs.items()
    }
    return {key: expected(run, fp32[*key[:2], "fp32"], rows[key]) for key, run in runs.items()}


def expected(run, fp32, row):
    """What each heading of the table of steps stands above, from the JSON of a run; `row` is
    that of results.csv.
    """
    times_ms = {
        each["phase"]: [1e3 * time_s for time_s in each["times_s"]] for each in run["measurements"]
    }
    model, tokens = (
        SIZES[run["config"]["size"]],
        run["config"]["batch_size"] * run["config"]["model"]["context_length"],
    )
    mean_ms, cv = (
        statistics.fmean(times_ms["step"]),
        statistics.stdev(times_ms["step"]) / statistics.fmean(times_ms["step"]),
    )
    weights = (
        model.num_layers * (4 * model.d_model**2 + 3 * model.d_model * model.d_ff)
        + VOCABULARY * model.d_model
    )
    attention = 4 * model.num_layers * run["config"]["model"]["context_length"] * model.d_model
    peak = {"fp32": 67e12, "bf16": 989.5e12}[run["config"]["precision"]]
    speed_up = (
        statistics.fmean(fp32) * 1e3 / mean_ms if run["config"]["precision"] == "bf16" else None
    )
    return {
        "size": run["config"]["size"],
        "context": run["config"]["model"]["context_length"],
        "precision": run["config"]["precision"],
        "step ms": mean_ms,
        "std/mean %": cv,
        "tokens/s": tokens / mean_ms * 1e3,
        **{
            f"{phase} ms": statistics.fmean(times_ms[phase])
            for phase in ("forward", "backward", "optimizer")
        },
        "MFU %": 3 * (2 * weights + attention) * tokens / (mean_ms / 1e3) / peak,
        "peak GiB": run["memory"]["peak_allocated_bytes"] / 2**30,
        "speed-up vs fp32": speed_up,
        "predicted GiB": float(row["predicted_peak_gib"]),
        "of ceiling %": float(row["ceiling_share"]),
        "predicted ms": float(row["predicted_step_ms"]),
        "error %": float(row["predicted_step_ms"]) / mean_ms - 1,
    }
