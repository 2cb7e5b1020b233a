"""Steps that are drawn, to score forecasts on shapes for which nothing was chosen.

`python -m tests.gpu.drawn_steps draw SEED COUNT > FILE` draws them, which needs no GPU, and
`measure FILE DIRECTORY` measures them on this machine. The file is committed before, and none of
its steps is left out. `pack DIRECTORY ZIP` keeps the records in a zip file, with the ceilings that
`cs336 ceilings --output DIRECTORY` measured in the same session. `score ZIP... > CSV` sets
forecasts beside the records of each zip file: by the ceilings that come with the program, and by
those of the session alone.
"""

import math
import random
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from cs336.config import SIZES, Attention, Device, Mode, OptimizerKind, Phase, Precision, RunConfig
from cs336.costs.accounting import step_flops
from cs336.costs.memory import predicted_peak_bytes
from cs336.costs.ranks_time import predicted_time
from cs336.costs.time import limited_by_launches, prepare_forecasts
from cs336.files import encode_json
from cs336.record import RunRecord, WarningCode, read_record
from cs336.report.formats import to_csv
from cs336.studies.ceilings_files import FILE_NAME, NO_CEILINGS_HERE, Ceilings
from cs336.studies.ceilings_records import CeilingsStudy
from cs336.studies.records import read_study
from cs336.sweep.run import run_sweep
from tests.faults.harness import Witness

GIB = 2**30
MOST_BYTES = 60 * GIB
"""A step that needs more is drawn again, so that all fit on an H100."""
ROUGHLY_FLOPS_PER_S = {Precision.FP32: 40e12, Precision.TF32: 250e12, Precision.BF16: 450e12}
SHORTEST_S, LONGEST_S = 5e-3, 0.6
"""Bounds of FLOPs over that rate, so that forty steps take minutes."""


def log_uniform(rng: random.Random, low: float, high: float) -> float:
    """A number from `low` to `high` whose logarithm is evenly distributed."""
    return low * (high / low) ** rng.random()


def draw(rng: random.Random) -> RunConfig:
    """A step of any width, length, batch, precision and mode, with as many layers as a preset."""
    size = rng.choice(["small", "medium", "large", "2.7B"])
    d_head = rng.choice([64, 80, 96, 128])
    heads = max(4, round(log_uniform(rng, 512, 4096) / d_head))
    d_model = heads * d_head
    d_ff = 64 * round(log_uniform(rng, 2, 4.5) * d_model / 64)
    context_length = round(log_uniform(rng, 128, 4096))
    if rng.random() < 0.75:
        context_length -= context_length % 8
    model = replace(
        SIZES[size],
        d_model=d_model,
        num_heads=heads,
        d_ff=d_ff,
        context_length=context_length,
        vocab_size=rng.choice([10_000, 32_000, 50_257]),
        attention=rng.choice([*Attention]),
    )
    return RunConfig(
        size=size,
        model=model,
        device=Device.CUDA,
        batch_size=round(log_uniform(rng, 1, 32)),
        mode=rng.choice([Mode.TRAIN, Mode.TRAIN, Mode.TRAIN, Mode.INFERENCE]),
        precision=rng.choice([*ROUGHLY_FLOPS_PER_S]),
        optimizer=rng.choice([OptimizerKind.ADAMW, OptimizerKind.FUSED]),
        warmup_steps=3,
        measured_steps=7,
    )


def steps(seed: int, count: int) -> Iterator[RunConfig]:
    """`count` drawn steps that fit, and that take neither too short nor too long."""
    rng = random.Random(seed)
    kept = 0
    while kept < count:
        config = draw(rng)
        flops, peak_bytes = step_flops(config), predicted_peak_bytes(config)
        if flops is None or peak_bytes is None or peak_bytes > MOST_BYTES:
            continue
        if SHORTEST_S <= flops / ROUGHLY_FLOPS_PER_S[config.precision] <= LONGEST_S:
            kept += 1
            yield config


def score(archive: Path) -> Iterator[dict[str, Any]]:
    """A row for each record of an archive: its time, and that foretold by each of the ceilings, in
    ms; the interval is that in which nine of ten steps are to lie.
    """
    records, own = opened(archive)
    prepare_forecasts([record.config for record in records])
    for record in records:
        step = record.measurement(Phase.STEP)
        assert step is not None
        assert record.device_name is not None
        codes = {warning.code for warning in record.warnings}
        row: dict[str, Any] = {
            "draw": archive.stem,
            "step": record.config.label,
            "device_name": record.device_name,
            "limit": "launches" if WarningCode.LAUNCH_BOUND in codes else "device",
            "launched_percent": 100 * launched_share(record),
            "warnings": ";".join(sorted(codes)),
            "step_ms": 1e3 * step.median_s,
        }
        for name, known in {"shipped": NO_CEILINGS_HERE, "own": own}.items():
            if known is None:
                continue
            curves = known.curves(record.device_name)
            assert curves is not None
            time = predicted_time(record.config, curves)
            if time is None or time.low_s is None or time.high_s is None:
                continue
            row[f"{name}_ms"] = 1e3 * time.step_s
            row[f"{name}_error"] = 100 * (time.step_s / step.median_s - 1)
            row[f"{name}_low_ms"], row[f"{name}_high_ms"] = 1e3 * time.low_s, 1e3 * time.high_s
        yield row


def launched_share(record: RunRecord) -> float:
    """Share of a step in phases at whose end the device had caught up with the host."""
    phases_s = {
        measured.phase: measured.times_s
        for measured in record.measurements
        if measured.phase is not Phase.STEP
    }
    host_phases_s = {measured.phase: measured.times_s for measured in record.host_phases}
    limited = limited_by_launches(phases_s, host_phases_s)
    return sum(limited.values()) / sum(map(fmean, phases_s.values()))


def opened(archive: Path) -> tuple[list[RunRecord], Ceilings | None]:
    """The records in a zip file, and the ceilings of their session if any were measured."""
    with zipfile.ZipFile(archive) as files:
        names = sorted(files.namelist())
        records = [read_record(Path(name), files.read(name)) for name in names if name != FILE_NAME]
        if FILE_NAME not in names:
            return records, None
        study = read_study(Path(FILE_NAME), CeilingsStudy, files.read(FILE_NAME))
    return records, Ceilings((study,))


def pack(directory: Path, archive: Path) -> None:
    """Write the records of a directory, and the ceilings if any were measured into it, to a zip
    file.
    """
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as files:
        for ceilings in directory.rglob(FILE_NAME):
            files.write(ceilings, FILE_NAME)
        for path in sorted(directory.rglob("runs/*.json")):
            files.write(path, path.name)


def summary(rows: Sequence[Mapping[str, Any]], name: str) -> Iterator[str]:
    """How far one of the forecasts is off, by draw and by what limits the steps."""
    groups: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if f"{name}_error" in row:
            groups[f"{row['draw']}, {name}, limited by the {row['limit']}"].append(row)
            if not row["launched_percent"]:
                groups[f"{row['draw']}, {name}, by the device in each phase"].append(row)
    for title, chosen in groups.items():
        errors = sorted(abs(row[f"{name}_error"]) for row in chosen)
        inside = [
            row[f"{name}_low_ms"] <= row["step_ms"] <= row[f"{name}_high_ms"] for row in chosen
        ]
        widths = [math.sqrt(row[f"{name}_high_ms"] / row[f"{name}_low_ms"]) for row in chosen]
        nine = errors[math.ceil(0.9 * len(errors)) - 1]
        yield (
            f"{title}: {len(errors)} steps, median {median(errors):.1f} %, "
            f"nine of ten {nine:.1f} %, largest {errors[-1]:.1f} %, inside {sum(inside)}, "
            f"interval in the median times and by {median(widths):.2f}"
        )


def main(verb: str, *words: str) -> None:
    """Draw steps into standard output, measure those of a file, or score them; see the module."""
    if verb == "draw":
        seed, count = map(int, words)
        sys.stdout.buffer.write(encode_json(list(steps(seed, count))))
    elif verb == "pack":
        pack(*map(Path, words))
    elif verb == "score":
        rows = [row for word in words for row in score(Path(word))]
        columns = list(dict.fromkeys(key for row in rows for key in row))
        sys.stdout.write(to_csv(columns, [[row.get(key) for key in columns] for row in rows]))
        sys.stderr.write("\n".join([*summary(rows, "shipped"), *summary(rows, "own"), ""]))
    else:
        file, directory = map(Path, words)
        configs = msgspec.json.decode(file.read_bytes(), type=list[RunConfig])
        outcome = run_sweep(configs, directory, Witness(), timeout_s=60)
        for record in outcome.records:
            print(record.config.label, record.status, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
