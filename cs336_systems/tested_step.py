"""A training step in a test: what it costs, from a trace without data and without a GPU, beside
limits and beside what it cost before; on a GPU also how long it takes.
"""

from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from statistics import fmean
from typing import Any

import msgspec

from .analysis.compare import Comparison, Verdict, compare_in_turn, interleave, measured_steps
from .analysis.limits import Interval, Limits, OverBudgetError, check, exactly
from .analysis.limits import Verdict as LimitVerdict
from .analysis.statistics import mean_interval
from .commands.account import AccountArguments, device_meant
from .commands.configure import checked_factory, make_config
from .commands.machine import first_gpu
from .commands.parse import flag_names
from .config import Device, ModelConfig, Phase, RunConfig
from .costs.hardware import devices_called
from .costs.memory import predict_memory
from .costs.step_costs import Costs, KeptCosts, has_uncounted_flops, step_costs
from .costs.traces import is_at_hand, own_parameters, tape_of, trace_missing, why_untraced
from .measure.inputs import parameters_of
from .record import RunRecord, Status
from .report.words import GIB
from .torch_needed import torch_version

LIMITED = ("peak_gib", "saved_gib", "flops", "operations")
OF_FACTORY = {"size", "model"}
"""Settings of `cs336 account` that say which model it is."""
PROCESSES = 5
"""Fresh processes of a side whose times are compared."""


class GrownError(AssertionError):
    """A step costs more than it did."""


def config_of(model: str, settings: Mapping[str, Any]) -> RunConfig:
    """The step of a factory with these settings, whose names are those of flags with underscores;
    raise ValueError for one that is unknown or has no such value.
    """
    declared = {field.name: field.type for field in (*fields(RunConfig), *fields(ModelConfig))}
    usable = [name for name in declared if name in flag_names(AccountArguments) - OF_FACTORY]
    converted = {}
    for name, value in settings.items():
        if name not in usable:
            known = ", ".join(usable)
            raise ValueError(f"cs336_step: {name!r} is no setting; needed one of {known}")
        try:
            converted[name] = msgspec.convert(value, declared[name])
        except msgspec.ValidationError as error:
            raise ValueError(f"cs336_step: {name}: {error}") from error
    config = make_config(Device.CUDA, size="small", model_factory=model, **converted)
    return checked_factory(config, settings.keys())


@dataclass(frozen=True, kw_only=True)
class TestedStep:
    """One step of a user's model, or one that the user wrote as a function."""

    __test__ = False  # pytest collects classes of such a name

    name: str
    config: RunConfig
    given: Collection[str] = ()
    """Names of the settings that the test gives."""
    kept: KeptCosts
    seen: MutableMapping[str, Costs]
    """Costs of the steps of these tests, by name."""
    updates: bool = False
    """Whether what is seen is to be kept."""

    @cached_property
    def costs(self) -> Costs:
        """What the step costs; raise ValueError with the reason if it cannot be traced."""
        trace_missing([self.config])
        if not is_at_hand(self.config):
            raise ValueError(f"cs336_step: {self.name}: {why_untraced(self.config)}")
        if not own_parameters(self.config):
            self._check_given()
        costs = self.seen[self.name] = step_costs(tape_of(self.config))
        return costs

    def _check_given(self) -> None:
        """Raise ValueError for a setting that a step which is a function does not take: the others
        are decided by its code.
        """
        taken = parameters_of(self.config.model_factory or "")
        ignored = [] if taken is None else sorted({*self.given} - taken)
        if ignored:
            raise ValueError(
                f"cs336_step: {self.name}: {', '.join(ignored)} would do nothing, as the factory "
                "makes a step and does not take it; leave it out"
            )

    def _total(self, quantity: str) -> int:
        return sum(self.costs[quantity].values())

    def peak_gib(self, device_name: str | None = None) -> float:
        """The peak of allocated memory, as `cs336 account` forecasts it for a Hopper GPU; others
        need up to 48 MiB less. Raise ValueError for a device that no data sheet has.
        """
        # an H100 may be one of several, which all allocate the same
        if device_name is not None and not devices_called(device_name):
            device_meant(device_name)  # raises the error that names those that are meant
        self._total("peak_bytes")  # which traces the step
        prediction = predict_memory(self.config)
        if prediction is None:
            raise ValueError(f"cs336_step: {self.name}: its memory is not predicted")
        return prediction.peak.allocated_bytes / GIB

    @property
    def saved_gib(self) -> float:
        """What the forward passes of a step leave for backward."""
        return self._total("saved_bytes") / GIB

    @property
    def kept_gib(self) -> float:
        """How much more there is after each step; 0 for one that keeps nothing."""
        return self._total("kept_bytes") / GIB

    @property
    def kept_nodes(self) -> int:
        """How many more nodes of autograd there are after each step: the graph of a loss that is
        kept or added up without `detach`.
        """
        return self._total("kept_nodes")

    @property
    def flops(self) -> int:
        """FLOPs of matmuls, recomputed ones too; raise ValueError for a step with convolutions,
        whose FLOPs are not counted.
        """
        if has_uncounted_flops(self.costs):
            raise ValueError(f"cs336_step: {self.name}: FLOPs of convolutions are not counted")
        return self._total("flops")

    @property
    def recomputed_flops(self) -> int:
        """FLOPs of matmuls that checkpoints run a second time."""
        return self._total("recomputed_flops")

    @property
    def operations(self) -> int:
        """Operations that the host dispatches to the GPU, views left out."""
        return self._total("operations")

    def budget(self, **limits: float) -> list[LimitVerdict]:
        """Raise OverBudgetError if the step takes more than these limits of `step_ms`, `peak_gib`,
        `saved_gib`, `flops` and `operations`; return the verdicts.

        The time is that of fresh processes on this machine's GPU; without one, and where the limit
        lies within the interval of their mean, it cannot be told, which is no failure.
        """
        __tracebackhide__ = True
        seen: dict[str, Interval | None] = {}
        for name in limits:
            if name == "step_ms":
                seen[name] = self._step_ms()
            elif name in LIMITED:
                value = self.peak_gib() if name == "peak_gib" else getattr(self, name)
                seen[name] = exactly(value)
            else:
                known = ", ".join(["step_ms", *LIMITED])
                raise ValueError(f"budget: {name!r} is no limit of a step; needed one of {known}")
        told = Limits(**limits).verdicts(seen)
        check(told)
        return told

    def check(self) -> None:
        """Raise GrownError if the step costs more than what is kept of it, with the module that has
        grown. Under `--cs336-update` keep what it costs now.
        """
        from .report.growth import growths

        __tracebackhide__ = True  # pytest then shows the line of the test
        costs = self.costs
        if self.updates:
            return
        before = self.kept.steps.get(self.name, {})
        if unknown := [quantity for quantity in costs if quantity not in before]:
            what = f"no {unknown[0]}" if before else "nothing"
            raise GrownError(
                f"{what} is kept of {self.name}: run pytest --cs336-update once, and commit the "
                "file that it writes"
            )
        lines = [f"  {growth}" for growth in growths(before, costs)]
        if lines:
            if (version := torch_version()) != self.kept.torch:
                lines.append(f"  what is kept is of torch {self.kept.torch}, and this is {version}")
            lines.append("if it has to, run pytest --cs336-update and commit the file")
            raise GrownError("\n".join([f"{self.name} costs more than it did:", *lines]))

    def check_time(self, than: str, **settings: Any) -> Comparison | None:  # noqa: ANN401
        """Raise OverBudgetError if the step is slower than that of another factory, such as the
        one before a change, by fresh processes of both in turn on this machine's GPU.

        Return the comparison, whose verdict may be that one cannot tell; None without a GPU.
        """
        other = config_of(than, settings)
        if first_gpu() is None:
            return None
        a, b = _measured([other, self.config])
        compared = compare_in_turn(measured_steps(a, 2), measured_steps(b, 2))
        if compared.verdict is Verdict.SLOWER:
            raise OverBudgetError(
                f"{self.name} takes {compared.ratio:.3g} times as long as {than} "
                f"({compared.low:.3g} to {compared.high:.3g})"
            )
        return compared

    def _step_ms(self) -> Interval | None:
        """The mean of fresh processes with its interval; None without a GPU."""
        if first_gpu() is None:
            return None
        means_ms = []
        for record in _measured([self.config])[0]:
            measured = record.measurement(Phase.STEP)
            if measured is not None:
                means_ms.append(1e3 * measured.mean_s)
        interval = mean_interval(means_ms)
        return None if interval is None else Interval(fmean(means_ms), *interval)


def _measured(configs: list[RunConfig]) -> list[list[RunRecord]]:
    """The records of fresh processes of each of these steps, measured in turn on the GPU."""
    from .report.progress import StatusLine
    from .sweep.run import run_sweep
    from .temporary import temporary_directory

    sides = len(configs)
    runs = [
        replace(configs[side], repeat=sides * repeat + side)
        for side, repeat in interleave(sides, PROCESSES)
    ]
    with temporary_directory() as directory, StatusLine() as status:
        records = run_sweep(runs, directory, status).records
    of_sides: list[list[RunRecord]] = [[] for _ in configs]
    for record in sorted(records, key=lambda record: record.subject.repeat):
        if record.status is not Status.OK:
            why = record.failure.message if record.failure else record.status
            raise ValueError(f"cs336_step: {record.subject.label} was not measured: {why}")
        of_sides[record.subject.repeat % sides].append(record)
    return of_sides
