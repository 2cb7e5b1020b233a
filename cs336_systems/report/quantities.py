"""What is known of the steps of one configuration: every column of results.csv and of its table.

A column is added here and nowhere else: declare a method as a `quantity` of `StepResult`. Its place
in the class is its place in results.csv.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from ..analysis.compare import Verdict, are_apart, compare_apart, measured_steps
from ..analysis.loop_times import LoopTimes
from ..analysis.statistics import mean_interval, quotient_stdev
from ..analysis.warnings import in_doubt
from ..config import OF_SEVERAL_RANKS, Phase, RunConfig
from ..costs.accounting import mfu, step_flops
from ..costs.communication import calls
from ..costs.curves import Curves, time_s
from ..costs.hardware import DeviceSpec, find_device
from ..costs.memory import predicted_peak_bytes
from ..costs.ranks_time import predicted_time
from ..costs.time import TimePrediction
from ..record import Activity, Environment, Measurement, Memory, RunRecord, Status, WarningCode
from ..studies.ceilings_files import Ceilings
from ..subject import Subject
from .column import Quantity, Written, quantity, signed, three_digits, two_digits
from .identity import Identity, identity, placed_settings
from .words import (
    DOUBT,
    GIB,
    MIB,
    TERA,
    ended,
    interval_digits,
    interval_text,
    mean_and_std,
    ratio,
    rounded,
    scaled,
    significant,
    status_text,
)

Value: TypeAlias = float | None
"""The value of a quantity; None for unknown."""
MS = 1e3
"""Milliseconds in a second."""


def _mean(values: Iterable[Value]) -> Value:
    """The mean of the values that are known; None without any."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


class Pooled(NamedTuple):
    """Times of one phase over all processes; None for unknown."""

    mean_s: Value
    """Mean over the processes' means."""
    stdev_s: Value
    """Standard deviation of a step within its process: the processes' variances, weighted by
    their degrees of freedom.
    """


class OtherColumns:
    """Columns of a CSV file that stand here, and are no quantities of this class."""

    def __init__(self, *keys: str) -> None:
        """`keys` are the keys of columns that are computed elsewhere and come next in the CSV
        file.
        """
        self.keys = keys


@dataclass(frozen=True, kw_only=True, eq=False)
class SpeedUp(Quantity[Value]):
    """How many times faster a step is than the baseline's; see `StepResult.gain`.

    The baseline has the first value of the first of `settings`, and differs in no setting but
    these: fp32, naive attention, no compilation, the plain AdamW, a step that is not shared.
    """

    settings: tuple[str, ...]


class Gain(NamedTuple):
    """How many times faster one step is than another."""

    ratio: Value = None
    std: Value = None
    """Deviation that follows from those of both steps."""
    is_doubted: bool = False
    """Whether a warning of either puts a time in doubt."""
    low: Value = None
    high: Value = None
    """Interval of the ratio."""

    def text(self, scale: float = 1) -> str:
        """The ratio with as many digits as its interval, so that it lies visibly inside; empty
        for unknown.
        """
        if self.ratio is None:
            return ""
        if self.low is not None and self.high is not None:
            text = significant(self.ratio, interval_digits(self.low, self.high))
        elif self.is_doubted and self.std is not None:
            text = mean_and_std(self.ratio * scale, self.std * scale)
        else:
            text = three_digits(self.ratio * scale)
        return f"{text} {DOUBT}" if self.is_doubted else text

    def interval(self) -> str:
        """The interval of the ratio, `2.56 to 2.58`; empty for unknown."""
        return interval_text(self.low, self.high)

    @classmethod
    def over(cls, slow: "StepResult", fast: "StepResult", ratio: float) -> "Gain":
        """The gain without an interval."""
        codes = [*slow.codes, *fast.codes]
        std = None
        if WarningCode.PROCESSES_APART not in codes:  # that of steps says nothing of these
            std = quotient_stdev(ratio, slow.step_cv, fast.step_cv)
        return cls(ratio, std, in_doubt(codes))


def _times(
    phase: Phase, about: str, place: int, drop_order: int = 0, in_csv: Written = "always"
) -> tuple[Quantity[Value], Quantity[Value]]:
    """The mean time of a phase, and its standard deviation, which the same cell shows."""
    std = Quantity(
        "",
        "ms",
        f"Standard deviation of {phase}.",
        compute=lambda result: scaled(result.pooled(phase).stdev_s, MS),
        in_csv=in_csv,
    )
    mean = Quantity(
        phase,
        "ms",
        about,
        compute=lambda result: scaled(result.pooled(phase).mean_s, MS),
        std=f"{phase}_std_ms",
        place=place,
        drop_order=drop_order,
        in_csv=in_csv,
    )
    return mean, std


def _activity(
    name: str, about: str, place: int, of_record: Callable[[Activity, DeviceSpec | None], Value]
) -> Quantity[Value]:
    """The column of how busy units of the GPU are, the mean over processes."""

    def compute(result: "StepResult") -> Value:
        device = find_device(result.device_name or "")
        return _mean(of_record(activity, device) for activity in result.activities)

    return Quantity(
        name,
        "%",
        f"{about}, by the GPU's own counters.",
        compute=compute,
        place=place,
        drop_order=10,
        scale=100,
        write=three_digits,
        in_csv="known",
    )


def _speed_up(
    baseline: str, about: str, *settings: str, place: int, name: str = "speed-up", scale: float = 1
) -> SpeedUp:
    """The column of a speed-up over a baseline that differs in these settings."""
    return SpeedUp(
        name,
        baseline,
        about,
        compute=lambda result: result.gain(settings).ratio,
        settings=settings,
        place=place,
        drop_order=4,
        text=lambda result: result.gain(settings).text(scale),
        in_csv="never",
    )


class StepResult(Mapping[str, Any]):
    """One configuration on one device, measured by the processes of `records`.

    If some repeats failed, the times are those of the others, `status` and `error` are those of the
    first failure, and `warnings` counts the failures. An unknown quantity is None.

    Its quantities are attributes. Code for any table reads them, and the settings, by key.
    """

    def __init__(self, subject: Subject, records: Sequence[RunRecord], ceilings: Ceilings) -> None:
        self.subject = subject
        self.config = subject if isinstance(subject, RunConfig) else None
        """None for a watched loop."""
        self.records = records
        self.ceilings = ceilings
        self.done = [record for record in records if record.status is Status.OK]
        self.failed = [record for record in records if record.status is not Status.OK]
        self.identity: Identity = identity(self.subject, self.device_name)
        self.baselines: dict[tuple[str, ...], StepResult] = {}
        """The result that a speed-up is over, by the settings in which they differ."""

    @classmethod
    def entries(cls) -> Iterator[Quantity[Any]]:
        """The quantities declared in this class itself, not in its bases, in the order of
        declaration.
        """
        return (entry for entry in vars(cls).values() if isinstance(entry, Quantity))

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401 (the value of any column)
        """The value of a column: of a quantity, of a setting, or under "identity" all settings."""
        if isinstance(getattr(type(self), key, None), Quantity):
            return getattr(self, key)
        # code for rows of any kind finds the identity of a row in the row
        return self.identity if key == "identity" else self.identity[key]

    def __iter__(self) -> Iterator[str]:
        """The keys of all columns: settings, then quantities."""
        yield from dict.fromkeys([*self.identity, *(entry.key for entry in self.entries())])

    def __len__(self) -> int:
        """The number of columns."""
        return sum(1 for _ in self)

    @classmethod
    def speed_ups(cls) -> Iterator[SpeedUp]:
        """The columns of speed-ups."""
        return (entry for entry in cls.entries() if isinstance(entry, SpeedUp))

    @classmethod
    def csv_keys(cls, results: Sequence["StepResult"]) -> list[str]:
        """Keys of the columns of the CSV file that have a place in the class, in order."""
        written = {"always"}
        if any(result.is_shared for result in results):
            written.add("shared")
        if any(result.config is None for result in results):
            written.add("watched")
        keys: list[str] = []
        for entry in vars(cls).values():
            if isinstance(entry, OtherColumns):
                keys += entry.keys
            elif isinstance(entry, Quantity):
                values = (result[entry.key] for result in results)
                is_known = entry.in_csv == "known" and any(value is not None for value in values)
                if is_known or entry.in_csv in written:
                    keys.append(entry.key)
        return keys

    # what the quantities are computed from

    @property
    def is_shared(self) -> bool:
        """Whether ranks share each step; of a watched loop that is not known."""
        return self.config is not None and self.config.is_shared

    @property
    def environments(self) -> list[Environment | None]:
        """Where each of the runs was measured."""
        return [record.environment for record in self.records]

    def measured(self, phase: Phase) -> list[Measurement]:
        """The times of the phase in each process that has any."""
        measurements = (record.measurement(phase) for record in self.done)
        return [measurement for measurement in measurements if measurement is not None]

    def pooled(self, phase: Phase) -> Pooled:
        """The times of the phase over all processes."""
        measured = self.measured(phase)
        if not measured:
            return Pooled(None, None)
        mean_s = statistics.fmean(measurement.mean_s for measurement in measured)
        spreads = []
        for measurement in measured:
            if measurement.stdev_s is not None:
                spreads.append((len(measurement.times_s) - 1, measurement.stdev_s))
        freedom = sum(degrees for degrees, _ in spreads)
        if not freedom:
            return Pooled(mean_s, None)
        squares_s2 = sum(degrees * stdev_s**2 for degrees, stdev_s in spreads)
        return Pooled(mean_s, math.sqrt(squares_s2 / freedom))

    def part_ms(self, phase: Phase) -> Value:
        """The mean time of the phase in a step, over all steps, those without the phase too."""
        means_s = []
        for record in self.done:
            part, step = record.measurement(phase), record.measurement(Phase.STEP)
            if part is not None and step is not None:
                means_s.append(part.mean_s * (len(part.times_s) / len(step.times_s)))
        return scaled(_mean(means_s), MS)

    @cached_property
    def step(self) -> Pooled:
        """The times of the whole step."""
        return self.pooled(Phase.STEP)

    @cached_property
    def times_s(self) -> list[float]:
        """The times of all measured steps of all processes."""
        return list(chain.from_iterable(step.times_s for step in self.measured(Phase.STEP)))

    @cached_property
    def interval_s(self) -> tuple[float, float] | tuple[None, None]:
        """95 % interval of the mean step over the processes' means.

        It is unknown below three processes, as the steps of one process are not independent, and
        of equal means.
        """
        means_s = [measurement.mean_s for measurement in self.measured(Phase.STEP)]
        return mean_interval(means_s) or (None, None)

    @cached_property
    def flops_per_s(self) -> Value:
        """The model's FLOPs of one rank over the mean step; of a watched loop, over its time."""
        if self.config is None:
            return _mean(LoopTimes(record).flops_per_s for record in self.done)
        if not self.step.mean_s:
            return None
        flops = step_flops(self.config)
        return None if flops is None else flops / self.step.mean_s

    @cached_property
    def curves(self) -> Curves | None:
        """Times on the device, from its measured ceilings."""
        return self.ceilings.curves(self.device_name or "")

    @cached_property
    def forecast(self) -> TimePrediction | None:
        """The step as predicted from the measured ceilings of the device."""
        if self.config is None or self.curves is None:
            return None
        return predicted_time(self.config, self.curves)

    @cached_property
    def memories(self) -> list[Memory]:
        """The counters of memory of each process that has any."""
        return [record.memory for record in self.done if record.memory is not None]

    @property
    def activities(self) -> list[Activity]:
        """How busy the GPU was in each process that knows it."""
        return [record.activity for record in self.done if record.activity is not None]

    @cached_property
    def codes(self) -> list[str]:
        """The warnings of all processes and those of their differences."""
        warnings = chain.from_iterable(record.warnings for record in self.records)
        codes = [str(warning.code) for warning in warnings]
        if are_apart(self.measured(Phase.STEP)):
            codes.append(WarningCode.PROCESSES_APART)
        if self.done and self.failed:
            codes.append(f"{len(self.failed)}-of-{len(self.records)}-repeats-failed")
        return list(dict.fromkeys(codes))

    def gain(self, settings: tuple[str, ...]) -> Gain:
        """The time of the baseline's step over that of this one.

        Each rank of a shared step has the baseline's batch, so that the ratio over a step that is
        not shared is the efficiency of weak scaling.
        """
        baseline = self.baselines.get(settings)
        if baseline is None or not baseline.step_mean_ms or not self.step_mean_ms:
            return Gain()
        return Gain.over(baseline, self, baseline.step_mean_ms / self.step_mean_ms)

    def may_be_chance(self, settings: tuple[str, ...]) -> bool:
        """Whether processes that show their scatter cannot tell this step from the baseline's."""
        sides = [measured_steps(result.records) for result in (self.baselines[settings], self)]
        compared = compare_apart(*sides)
        return not compared.is_assumed and compared.verdict is Verdict.CANNOT_TELL

    # the columns of results.csv, in order

    _model_and_step = OtherColumns(*placed_settings(1, 19))

    @quantity("world size")
    def world_size(self) -> int | None:
        """Processes that share a step."""
        return None if self.config is None else self.config.ranks

    @quantity(numeric=False)
    def device_name(self) -> str | None:
        """Name of the device."""
        names = (record.device_name for record in self.records)
        return next((name for name in names if name is not None), None)

    @quantity()
    def warmup_steps(self) -> int:
        """Steps before the measured ones."""
        return self.subject.warmup_steps

    @quantity()
    def measured_steps(self) -> int:
        """Measured steps of a process."""
        return self.subject.measured_steps

    @quantity("status", numeric=False, write=status_text)
    def status(self) -> Status | None:
        """How the run ended."""
        if self.failed:
            return self.failed[0].status
        return Status.OK if self.done else None

    @quantity(numeric=False)
    def error(self) -> str | None:
        """The message of the first failure."""
        failures = (record.failure for record in self.failed)
        return next((failure.message for failure in failures if failure is not None), None)

    forward_mean_ms, forward_std_ms = _times(
        Phase.FORWARD, "Time of forward, the loss included.", 40, 6
    )
    backward_mean_ms, backward_std_ms = _times(Phase.BACKWARD, "Time of backward.", 50, 7)
    optimizer_mean_ms, optimizer_std_ms = _times(
        Phase.OPTIMIZER, "Time of the optimizer's step.", 70, 8
    )
    step_mean_ms, step_std_ms = _times(
        Phase.STEP, "Mean time of a whole step, with its deviation.", 10
    )

    @quantity("std/mean", "%", place=100, drop_order=10, scale=100, write=two_digits)
    def step_cv(self) -> Value:
        """Standard deviation of a step over its mean."""
        mean_s, stdev_s = self.step
        return None if stdev_s is None or not mean_s else stdev_s / mean_s

    @quantity("median", "ms")
    def step_median_ms(self) -> Value:
        """Median of all steps."""
        return scaled(statistics.median(self.times_s), MS) if self.times_s else None

    @quantity("minimum", "ms")
    def step_min_ms(self) -> Value:
        """Shortest of all steps."""
        return scaled(min(self.times_s, default=None), MS)

    @quantity(
        "95 % interval",
        "ms, over processes",
        place=20,
        drop_order=1,
        text=lambda row: interval_text(row["step_ci95_low_ms"], row["step_ci95_high_ms"]),
    )
    def step_ci95_low_ms(self) -> Value:
        """Of the mean step, over the means of fresh processes (Student's t)."""
        return scaled(self.interval_s[0], MS)

    @quantity()
    def step_ci95_high_ms(self) -> Value:
        """Upper end of the interval of the mean step."""
        return scaled(self.interval_s[1], MS)

    @quantity("tokens/s", place=130, drop_order=5)
    def tokens_per_s(self) -> Value:
        """Tokens of a step over its mean time; of a watched loop, tokens over the time of the
        loop, with what lies between steps.
        """
        if self.config is None:
            return _mean(LoopTimes(record).tokens_per_s for record in self.done)
        tokens = self.subject.tokens_per_step
        return tokens / self.step.mean_s if tokens and self.step.mean_s else None

    @quantity("model FLOPs", "TFLOP/s")
    def model_tflops_per_s(self) -> Value:
        """The model's FLOPs per second, those of all ranks together."""
        ranks = 1 if self.config is None else self.config.ranks
        return scaled(self.flops_per_s, ranks / TERA)

    @quantity("MFU", "%", place=140, drop_order=3, scale=100, write=three_digits)
    def mfu(self) -> Value:
        """The model's FLOPs per second over the peak of the data sheet at this precision."""
        precision = self.subject.precision
        if self.flops_per_s is None or self.device_name is None or precision is None:
            return None
        return mfu(self.flops_per_s, self.device_name, precision)

    @quantity("peak", "GiB", place=160, drop_order=2, write=three_digits)
    def peak_allocated_gib(self) -> Value:
        """The most memory that was allocated at any time."""
        peaks = (memory.peak_allocated_bytes for memory in self.memories)
        return scaled(max(peaks, default=None), 1 / GIB)

    @quantity("reserved", "GiB")
    def peak_reserved_gib(self) -> Value:
        """The most memory that PyTorch held in segments at any time."""
        peaks = (memory.peak_reserved_bytes for memory in self.memories)
        return scaled(max(peaks, default=None), 1 / GIB)

    @quantity(numeric=False)
    def warnings(self) -> str | None:
        """Codes of warnings, joined by semicolons."""
        return ";".join(self.codes) or None

    @quantity("predicted", "GiB", place=170, drop_order=11, write=three_digits)
    def predicted_peak_gib(self) -> Value:
        """The peak that the configuration was predicted to have."""
        peak_bytes = None if self.config is None else predicted_peak_bytes(self.config)
        return scaled(peak_bytes, 1 / GIB)

    @quantity("of ceiling", "%", place=150, drop_order=12, scale=100, write=three_digits)
    def ceiling_share(self) -> Value:
        """The model's FLOPs per second over the highest measured rate."""
        if self.config is None or self.flops_per_s is None or self.device_name is None:
            return None
        ceiling = self.ceilings.flops_per_s(self.device_name, self.config.precision)
        return None if ceiling is None else self.flops_per_s / ceiling

    data_mean_ms, data_std_ms = _times(Phase.DATA, "Time to make a batch.", 30, 9)

    _shortcuts = OtherColumns(*placed_settings(20, 29))

    @quantity(
        "predicted", "ms", place=80, drop_order=4, write=rounded, doubt="prediction_is_doubted"
    )
    def predicted_step_ms(self) -> Value:
        """Time of a step that follows from the configuration and the measured ceilings of the
        device.
        """
        return None if self.forecast is None else self.forecast.step_s * MS

    @quantity(
        "error", "%", place=90, drop_order=4, scale=100, write=signed, doubt="prediction_is_doubted"
    )
    def predicted_step_error(self) -> Value:
        """By how much the predicted step is longer (+) or shorter (-) than the measured one."""
        if self.predicted_step_ms is None or not self.step_mean_ms:
            return None
        return self.predicted_step_ms / self.step_mean_ms - 1

    _seldom = OtherColumns(*placed_settings(40, 49))

    @quantity("processes", drop_order=2, write=str)
    def processes(self) -> int:
        """Fresh processes that were measured."""
        return len(self.measured(Phase.STEP))

    communication_mean_ms, communication_std_ms = _times(
        Phase.COMMUNICATION,
        "Time between backward and the optimizer in which ranks still average gradients.",
        60,
        7,
        in_csv="shared",
    )

    @quantity("sent", "MiB", place=110, drop_order=11, write=three_digits, in_csv="shared")
    def sent_mib(self) -> Value:
        """What one rank sends in a step, if the ranks form a ring."""
        if not self.is_shared:
            return None
        sent_bytes = []
        for record in self.done:
            if record.traffic is not None:
                sent_bytes.append(sum(traffic.sent_bytes for traffic in record.traffic))
        return scaled(max(sent_bytes, default=None), 1 / MIB)

    @quantity(
        "collectives, predicted", "ms", place=120, drop_order=3, write=rounded, in_csv="shared"
    )
    def predicted_collectives_ms(self) -> Value:
        """Time of the step's collectives one after the other, by measured times of such
        collectives.
        """
        if self.config is None or self.device_name is None:
            return None
        collectives = calls(self.config)
        if collectives is None:
            return None
        curves = self.ceilings.collectives(self.device_name).get(self.config.ranks, {})
        return scaled(time_s(collectives, curves), MS)

    other_mean_ms, other_std_ms = _times(
        Phase.OTHER,
        "Time of a watched step in none of its phases: a loss outside of the model, logging.",
        75,
        9,
        in_csv="watched",
    )

    tensor_share = _activity(
        "tensor pipes",
        "Share of the time in which tensor pipes computed",
        142,
        lambda activity, _: activity.tensor_share,
    )
    sm_share = _activity(
        "SMs",
        "Share of the multiprocessors that had work",
        143,
        lambda activity, _: activity.sm_share,
    )
    dram_share = _activity(
        "DRAM",
        "Share of the memory's bandwidth that was used",
        144,
        lambda activity, _: activity.dram_share,
    )
    nvlink_share = _activity(
        "NVLink",
        "Share of the data sheet's rate of NVLink, in the direction with more",
        145,
        lambda activity, device: ratio(
            activity.nvlink_bytes_per_s, device.link_bytes_per_s if device else None
        ),
    )
    pcie_share = _activity(
        "PCIe",
        "Share of the rate of the link to the host, in the direction with more",
        146,
        lambda activity, _: ratio(activity.pcie_bytes_per_s, activity.pcie_peak_bytes_per_s),
    )

    # quantities that only tables have

    @quantity("energy", "J", place=165, drop_order=13, in_csv="never", of_one_run=True)
    def energy_per_step_j(self) -> Value:
        """Energy of all GPUs in a step, by their own counters, the mean over processes."""
        energies_j = []
        for record in self.done:
            of_gpus = [rank.telemetry for rank in record.ranks] or [record.telemetry]
            known_j = [gpu.energy_per_step_j for gpu in of_gpus if gpu is not None]
            if len(known_j) == (self.world_size or 1) and None not in known_j:
                energies_j.append(sum(filter(None, known_j)))
        return _mean(energies_j)

    @quantity(numeric=False, in_csv="never", write=str)
    def ended(self) -> str:
        """How the runs ended, in words."""
        return ended(*self.statuses)

    @quantity(in_csv="never")
    def statuses(self) -> list[Status]:
        """How each of the runs ended."""
        return [record.status for record in self.records]

    @quantity("first measured step", "ms", drop_order=2, in_csv="never")
    def first_step_ms(self) -> Value:
        """Time of the first step after warm-up."""
        first_s = (measurement.times_s[0] for measurement in self.measured(Phase.STEP))
        return scaled(_mean(first_s), MS)

    @quantity(in_csv="never")
    def prediction_is_doubted(self) -> bool:
        """Whether the ceilings of the forecast are in doubt."""
        return self.forecast is not None and self.curves is not None and self.curves.is_in_doubt

    @quantity(in_csv="never")
    def prediction_is_shipped(self) -> bool:
        """Whether the ceilings of the forecast come with this program."""
        return self.forecast is not None and self.curves is not None and self.curves.is_shipped

    speed_up = _speed_up(
        "vs fp32",
        "How many times faster than the same configuration in fp32.",
        "precision",
        place=180,
    )
    attention_speed_up = _speed_up(
        "vs naive",
        "How many times faster than the same configuration with naive attention.",
        "attention",
        "sdpa_backend",
        place=190,
    )
    compile_speed_up = _speed_up(
        "vs eager",
        "How many times faster than the same configuration without torch.compile.",
        "compile",
        "compile_blocks",
        place=200,
    )
    optimizer_speed_up = _speed_up(
        "vs adamw",
        "How many times faster than the same configuration with AdamW written out.",
        "optimizer",
        "own_optimizer",
        place=210,
    )
    weak_scaling = _speed_up(
        "%",
        "Time of the step of one process over that of all ranks, each of which has as large a "
        "batch.",
        *OF_SEVERAL_RANKS,
        place=220,
        name="weak scaling",
        scale=100,
    )
