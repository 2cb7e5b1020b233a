"""Answers about several processes."""

from collections.abc import Callable, Iterator
from dataclasses import asdict

from cs336_systems.config import Device, Mode, Parallel, Precision, RunConfig
from cs336_systems.costs.calls import Collective
from cs336_systems.record import MemoryMoment, RunRecord
from cs336_systems.report.columns import Column, Row, column, three_digits
from cs336_systems.report.entries import identities_of
from cs336_systems.report.frame import rows_of, to_frame
from cs336_systems.report.identity import by_name, identity_columns, names_of
from cs336_systems.report.numbers import MIB, between, percent_of, ratio, significant
from cs336_systems.report.page.answers.answer import (
    Answer,
    Material,
    Runs,
    best,
    from_best,
    is_plain,
    pairs,
    ratios,
    with_several,
)
from cs336_systems.report.page.commands import command_for
from cs336_systems.report.sections.ceilings.tables import collective_rows, collectives_section
from cs336_systems.report.sections.kernels.communication import OF_CONFIGURATION, by_configuration, gather_rows
from cs336_systems.report.sections.memory.words import size
from cs336_systems.report.table import make_table

SHARED = ("step_mean_ms", "forward_mean_ms", "backward_mean_ms", "communication_mean_ms", "optimizer_mean_ms",
          "sent_mib", "peak_allocated_gib")  # fmt: skip
MOMENTS = (
    Column("moment", numeric=False, key="moment", write=str),
    Column("parameters", key="parameters_bytes", write=size),
    Column("gradients", key="gradients_bytes", write=size),
    Column("optimizer's state", key="optimizer_state_bytes", write=size),
    Column("other", key="other_bytes", write=size),
    Column("in all", key="allocated_bytes", write=size),
)
"""Columns of the memory of one rank at a moment."""
OF_SHARDING = {
    "step_mean_ms": "a step takes",
    "peak_allocated_gib": "its peak of memory is",
    "sent_mib": "a rank sends",
}
"""Quantities that are compared with and without a sharded optimizer state, by column."""
ZERO_1 = (
    "ZeRO stage 1 (Rajbhandari et al. 2020) keeps the same parts of the state, but each rank averages only the "
    "gradients that it updates, by a reduce-scatter, before it gathers the parameters: it sends as much as one "
    "all-reduce of the gradients. The course's way averages all gradients on every rank, and sends the parameters "
    "besides."
)
PROCESSES = (2, 4, 6)
BACKENDS = {"gloo": Device.CPU, "NCCL": Device.CUDA}


def all_reduce(material: Material) -> Answer | None:
    """Times and rates of collectives by the size of the tensor."""
    studies = [(directory, study) for directory, study in material.collection.ceilings.items() if study.reductions]
    if not studies:
        return None
    directory, study = max(studies, key=lambda pair: (pair[1].grid.device is Device.CUDA, len(pair[1].reductions)))
    rows = collective_rows(study)
    fewest = min(row["world_size"] for row in rows)
    of_all_reduce = [row for row in rows if (row["collective"], row["world_size"]) == (Collective.ALL_REDUCE, fewest)]
    timed = [row for row in of_all_reduce if row["bus_gb_per_s"]]
    said = [
        f"{significant(row['median_ms'], 3)} ms for {size(round(row['tensor_mib'] * MIB))} "
        f"({significant(row['bus_gb_per_s'], 3)} GB/s on the bus)"
        for row in timed
        if row in (timed[0], timed[-1])
    ]
    sentences = [
        f"An all-reduce among {fewest} processes takes {' and '.join(said)}.",
        "Small tensors take the time of starting a transfer, whatever their size; large ones that of their bytes.",
    ]
    there = {(study.grid.device, cell.world_size) for _, study in studies for cell in study.reductions}
    missing = {
        name: [str(count) for count in PROCESSES if (device, count) not in there] for name, device in BACKENDS.items()
    }
    lacking = [f"{', '.join(counts)} processes with {name}" for name, counts in missing.items() if counts]
    each = " (--world-size, with --device cpu for gloo)" if lacking else ""
    return Answer(
        sentences=sentences,
        tables=collectives_section(study).tables,
        places=[(directory, "collectives")],
        commands=[command_for(material.collection, directory)],
        conditions=f"{study.device_name}, fp32",
        lacking=f"{' and '.join(lacking)}{each}",
    )


def averaged_gradients(material: Material) -> Answer | None:
    """Step and communication of the ways to average gradients."""

    def is_asked(config: RunConfig) -> bool:
        return not config.parallel.shards_parameters and not config.shard_optimizer

    def sentences(rows: list[Row], _: Runs) -> Iterator[str]:
        def share(part: str, whole: str) -> str:
            return between(by_name(rows, lambda row: ratio(row[part], row[whole])), percent_of)

        yield _steps(rows)
        yield (
            f"Communication between backward and the optimizer takes {share('communication_mean_ms', 'step_mean_ms')} "
            "of it; what runs while backward computes is not in that."
        )
        if exposed := share("exposed_mean_ms", "collective_mean_ms"):
            told = f"{exposed} of the time of collectives is exposed"
            yield f"In profiles of these runs, {told}: the GPU computes nothing."

    return _shared(material, "Ways to average gradients", "parallel", is_asked, sentences)


def sharded_optimizer(material: Material) -> Answer | None:
    """Time and peak of memory with the optimizer's state sharded and without."""

    def sentences(rows: list[Row], _: Runs) -> Iterator[str]:
        both = pairs(rows, "shard_optimizer", False)
        for key, what in OF_SHARDING.items():
            if words := between(ratios(both, key), three_digits):
                yield f"With the optimizer's state sharded, {what} {words} times that without."
        yield "The peaks are those of the rank with the highest."
        yield ZERO_1

    return _shared(material, "The optimizer's state sharded and whole", "shard_optimizer", lambda _: True, sentences)


def sharded_parameters(material: Material) -> Answer | None:
    """Time and peak of memory with sharded parameters, beside the ways that keep them whole."""

    def sentences(rows: list[Row], runs: Runs) -> Iterator[str]:
        peaks = by_name(rows, lambda row: row["peak_allocated_gib"] or None)
        if peaks:
            yield f"The peak of memory is {between(peaks, lambda gib: f'{significant(gib, 4)} GiB')}."
            yield from _saved(rows)
        yield _steps(rows)
        yield from _gathers_in_words(runs)

    kept = Material(collection=material.collection, runs=[own for own in material.runs if _has_shards(own)])
    return _shared(
        kept, "Parameters sharded and whole", "parallel", lambda config: not config.shard_optimizer, sentences
    )


def _of_leaderboard(config: RunConfig) -> bool:
    tokens = config.model.context_length * config.batch_size
    return (config.ranks, tokens, config.precision) == (2, 32_768, Precision.BF16)


@from_best(
    lambda own: [each for each in own.finished if (each.config.size, each.config.mode) == ("8B", Mode.TRAIN)],
    _of_leaderboard,
)
def leaderboard(runs: Runs) -> Answer:
    """The training step of the leaderboard: the fastest of those that were measured."""
    rows = sorted(runs.rows, key=lambda row: row["step_mean_ms"])
    fastest = rows[0]
    sentences = [
        f"The fastest step takes {significant(fastest['step_mean_ms'] / 1e3, 3)} s"
        + (f", {percent_of(fastest['mfu'])} of the peak's FLOPs" if fastest["mfu"] else "")
        + (f", with {significant(fastest['peak_allocated_gib'], 4)} GiB" if fastest["peak_allocated_gib"] else "")
        + " on each GPU.",
    ]
    columns = [*identity_columns(rows, ("size", "ranks")), *(column(key, drop_order=0) for key in (*SHARED, "mfu"))]
    return runs.answer(
        sentences,
        tables=[make_table("The leaderboard's step", columns, rows)],
        lacking="" if _of_leaderboard(runs.finished[0].config) else "32,768 tokens on each of 2 GPUs, in bf16",
    )


def _shared(
    material: Material,
    title: str,
    setting: str,
    is_asked: Callable[[RunConfig], bool],
    sentences: Callable[[list[Row], Runs], Iterator[str]],
) -> Answer | None:
    """An answer from the runs on several ranks that are asked for and differ from another in this setting."""

    def is_shared(config: RunConfig) -> bool:
        return config.parallel is not Parallel.NONE and is_plain(config, "parallel", "ranks", "shard_optimizer")

    def suiting(own: Runs) -> list[RunRecord]:
        return with_several(
            [each for each in own.finished if is_shared(each.config) and is_asked(each.config)], setting
        )

    def of_course(config: RunConfig) -> bool:
        return (config.size, config.ranks, config.device) == ("xl", 2, Device.CUDA)

    runs = best(material, suiting, of_course)
    if runs is None:
        return None
    told = by_configuration(runs.results.kernels)
    rows = [{**dict.fromkeys(OF_CONFIGURATION), **row, **told.get(row["config"], {})} for row in runs.rows]
    keys = (*SHARED, *(("collective_mean_ms", "exposed_mean_ms") if told else ()))
    columns = [*identity_columns(rows, ("size", "ranks", setting)), *(column(key, drop_order=0) for key in keys)]
    moments = [] if setting == "parallel" and not _has_shards(runs) else [*_moment_rows(runs)]
    kept = [*identity_columns(moments, ("size", "ranks", setting)), *MOMENTS] if moments else []
    return runs.answer(
        sentences(rows, runs),
        tables=[
            make_table(title, columns, rows),
            *([make_table("What the rank that keeps the most keeps", kept, moments)] if moments else []),
        ],
        lacking="" if all(of_course(record.config) for record in runs.results.records) else "xl on 2 GPUs",
    )


def _gathers_in_words(runs: Runs) -> Iterator[str]:
    """Whether each gather ended before it was needed, from profiles with ranges around gathers."""
    entries = [entry for entry in runs.results.kernels if entry.profile.gathers]
    if not entries:
        yield "Whether each gather ends before it is needed is told by a profile of the same runs (--profile)."
    names = names_of(identities_of(entries))
    for name, entry in zip(names, entries, strict=True):
        rows = list(gather_rows(entry.profile))
        count, late, waited_ms = (
            sum(row[key] for row in rows) for key in ("gathers_per_step", "late_per_step", "gather_waited_ms")
        )
        yield (
            f"In a profile of {name}, {significant(late, 3)} of {significant(count, 3)} gathers in a step end after "
            f"they are needed, and the step waits {significant(waited_ms, 3)} ms for them."
        )


def _saved(rows: list[Row]) -> Iterator[str]:
    """The least peak with sharded parameters beside the least with whole ones."""
    peaks: dict[bool, list[float]] = {True: [], False: []}
    for row in rows:
        if row["peak_allocated_gib"]:
            peaks[Parallel(row["parallel"]).shards_parameters].append(row["peak_allocated_gib"])
    if all(peaks.values()):
        ratio = min(peaks[True]) / min(peaks[False])
        yield f"The least peak with sharded parameters is {significant(ratio, 3)} times the least with whole ones."


def _steps(rows: list[Row]) -> str:
    steps = by_name(rows, lambda row: row["step_mean_ms"])
    return f"A step takes {between(steps, lambda time_ms: f'{significant(time_ms, 4)} ms')}."


def _has_shards(own: Runs) -> bool:
    return any(record.config.parallel.shards_parameters for record in own.finished)


def _moment_rows(runs: Runs) -> Iterator[Row]:
    """A row for each moment of each configuration: of the rank that keeps the most then."""
    for configuration in dict.fromkeys(record.config.configuration for record in runs.finished):
        record = next(record for record in runs.finished if record.config.configuration == configuration)
        [row] = rows_of(to_frame([record]))
        for at_moment in zip(*(rank.moments for rank in record.ranks), strict=True):
            most = max(at_moment, key=_kept_bytes)
            other = None if most.allocated_bytes is None else most.allocated_bytes - _kept_bytes(most)
            yield {"identity": row["identity"], **asdict(most), "other_bytes": other}


def _kept_bytes(moment: MemoryMoment) -> int:
    return moment.parameters_bytes + moment.gradients_bytes + moment.optimizer_state_bytes
