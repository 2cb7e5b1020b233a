"""Times the steps of a training loop that exists already: three lines in the loop.

    watched = watch(model, optimizer)
    for batch in loader:
        with watched.step():
            loss = model(batch).loss; loss.backward(); optimizer.step(); optimizer.zero_grad()
    watched.report()

A step is what the `with` block does on the device. Its phases are forward (the model's call),
backward (that of autograd), optimizer (the call of its `step`), data (waiting for a DataLoader) and
other: the loss outside of the model, clipping, logging, evaluation, another model's passes. Several
passes in one step are summed. On a GPU the marks are CUDA events, which are read once they have
passed: nothing waits.
"""

import contextlib
import io
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..analysis.limits import Limits, Verdict, check, verdicts
from ..analysis.loop_advice import loop_warnings
from ..analysis.warnings import launch_bound_phases
from ..config import Device, Phase, Profiler
from ..costs.accounting import mfu as share_of_peak
from ..files import in_one_line
from ..loop_record import LoopFlops, LoopRecord, SlowStep
from ..measure.run import Progress
from ..record import (
    Measurement,
    RunRecord,
    RunWarning,
    Status,
    Telemetry,
    WarningCode,
    read_record,
    with_other_ranks,
    write_rank,
    write_record,
)
from ..subject import WatchedLoop
from ..sweep.store import PROFILE_DIRECTORIES
from ..text import print_aside, print_line
from .exit import UNREPORTED, conclude
from .flops import LoopTracer
from .gpu import LoopGpu
from .growth import Growth, allocated_on_gpu
from .hooks import Hooks, hookable
from .live import Live, Sums
from .marks import LoopStep, Timeline, WatchedStep, resolved
from .observer import TROUBLES, Observer, note_trouble, overriding, say
from .out_of_memory import OutOfMemoryExplainer
from .pauses import Pauses
from .profiled import PROFILED_STEPS, Profiled
from .ranks import Ranks
from .slow_steps import SlowSteps
from .summary import all_measurements, described, measurements, seen_of
from .syncs import Syncs
from .tokens import NO_TOKENS, Pass, PassReader, Tokens

Batch = TypeVar("Batch")

MAX_KEPT_STEPS = 10_000
"""Most measured steps whose times are kept; of a longer loop, the last ones."""
MOST_PENDING, READ_EVERY_NS = 64, 250_000_000
"""Most steps that are marked before their times are computed, and the time from one computation to
the next: in a row, it costs less than after each step.
"""

FOREIGN_OPTIMIZER = (
    "the optimizer {} is no torch.optim.Optimizer, so its time is in other: its step has no hooks"
)
NO_FORWARD = (
    "no training forward pass of the model was seen, so the phases are empty: give watch the model "
    "that the loop calls (model(...), not model.forward(...), and the outermost wrapper)"
)


class Step(contextlib.ContextDecorator):
    """One step of a watched loop, as a context."""

    def __init__(self, watched: "Watched") -> None:
        self._watched = watched

    def __enter__(self) -> None:
        self._number = self._watched._begin_step()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._watched._end_step(self._number, error)


class Watched:
    """Watches the steps of a loop: put `with watched.step():` around each, and report.

    `model` is what the loop calls: the wrapper, if there is one (DistributedDataParallel), or
    several models; `optimizers` one or several. The first `warmup_steps` are not counted. The
    record goes to `output`/e2e_benchmark/`name`/runs/.

    `report()` prints the table and writes the record; `with watch(model, optimizer) as watched:`
    around the loop does so at its end. Where the loop ends before, by an exception, Ctrl-C or the
    end of the process, what was seen is reported then; of a step for which the GPU's memory did not
    suffice, what held it and which batch fits. Hooks change nothing that the loop computes,
    hold the model weakly, and are not in copies or checkpoints of it; `report()` and `remove()`
    take them away.

    With `profile`, torch.profiler records PROFILED_STEPS steps after the warm-up, with the model's
    modules as ranges, and the report says where their time went; later steps are not recorded. The
    record goes to kineto_profiles then. With `memory`, on a GPU, the allocator's history is
    recorded instead, and the report says what the memory holds, by which tensor it is; the record
    goes to memory_profiles.

    While it runs, a line on a terminal shows the last steps; in a file there is a line every
    hundred steps, and with `every` one every so many, wherever standard error goes (0: none).
    """

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module],
        optimizers: Any = (),  # noqa: ANN401 (also what wraps an optimizer)
        *,
        name: str = "mine",
        warmup_steps: int = 5,
        profile: bool = False,
        memory: bool = False,
        output: Path | str = "data",
        every: int | None = None,
    ) -> None:
        if not name.isidentifier():
            raise ValueError(
                f"watch: name must be letters, digits and underscores, as in my_model, got {name!r}"
            )
        if warmup_steps < 0:
            raise ValueError(f"watch: warmup_steps must be at least 0, got {warmup_steps}")
        if profile and memory:
            raise ValueError("watch: profile and memory record different steps: give one of them")
        models = (model,) if isinstance(model, nn.Module) else tuple(model)
        if isinstance(optimizers, torch.optim.Optimizer) or not isinstance(optimizers, Iterable):
            optimizers = (optimizers,)
        self._unseen: list[str] = []
        """What cannot be seen of this loop, in a sentence each."""
        several = []
        for optimizer in optimizers:
            hooked = hookable(optimizer)
            if hooked is None:
                self._unseen.append(FOREIGN_OPTIMIZER.format(type(optimizer).__name__))
            else:
                several.append(hooked)
        profiler = Profiler.KINETO if profile else Profiler.NONE
        if memory:
            profiler = Profiler.MEMORY
        self._models = tuple(map(weakref.ref, models))
        self.warmup_steps = warmup_steps
        self.directory = Path(output) / PROFILE_DIRECTORIES[profiler] / name
        device = _device_of(models)
        self.device = Device.CUDA if device.type == "cuda" else Device.CPU
        self.warmup: list[WatchedStep] = []
        self.measured: deque[WatchedStep] = deque(maxlen=MAX_KEPT_STEPS)
        self._begun = 0
        """Steps that have ended, and of these, steps that were read."""
        self._num_read = 0
        self._pending: deque[LoopStep] = deque()
        self._due_ns = 0
        """When the times of the pending steps are to be computed."""
        self._recorded: list[WatchedStep] = []
        """The measured steps that a profiler recorded."""
        self._num_parameters = _num_parameters(models)
        self._written: Path | None = None
        self._page: Path | None = None
        """The files of the last report."""
        self._rank: int | None = None
        """This process's rank, which is not known any more once the group has ended."""
        self._gpu: LoopGpu | None = None
        if self.device is Device.CUDA:
            self._gpu = LoopGpu(counts_activity=profiler is Profiler.NONE)
        if profiler is Profiler.MEMORY and self.device is Device.CPU:
            raise ValueError(
                "watch: memory=True needs the model on a GPU, whose allocator it records; got the "
                "CPU"
            )
        self._loop = WatchedLoop(
            name=name, device=self.device, profiler=profiler, warmup_steps=warmup_steps
        )
        self._progress = Progress(subject=self._loop, gpu=self._gpu.gpu if self._gpu else None)
        self._profiled = Profiled(models[0], several, self._loop, self.directory)
        self._timeline = Timeline(device)
        self._live = Live(name, self.measured, every, self._mfu, lambda: not self._rank)
        observers: list[Observer] = [self._live]
        if self._profiled.has_profiler:
            observers.insert(0, self._profiled)
        if self._gpu is not None:
            observers.insert(0, self._gpu)
        self._pauses = Pauses()
        self._slow_steps = SlowSteps(self._pauses, self._gpu)
        # the first, so that what other parts do lies in no pause
        observers.insert(0, self._slow_steps)
        self._syncs = Syncs(models)
        self._growth = Growth(allocated_on_gpu if self._gpu is not None else None)
        self._ranks = Ranks(name, models, self._slow_steps)
        observers.append(self._ranks)
        if self._gpu is not None:
            observers.append(self._growth)
        if self._syncs.sees_model:  # else its calls at each phase would only cost time
            observers.append(self._syncs)
        self._reader = PassReader(models, device)
        self._memory_explainer = OutOfMemoryExplainer(models, several, self._reader, device)
        self._observe([*observers, self._memory_explainer])
        self._tracer = LoopTracer(self._reader.calls.seen)
        self._hooks = Hooks(self._timeline, models, several, self._reader, self._pauses)
        self._hooks.attach()
        weakref.finalize(self, self._hooks.detach).atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Report what was seen, however the loop ended, and take the hooks away."""
        conclude(self)

    def step(self) -> "Step":
        """Around one step of the loop. A step that ends by an exception is not counted."""
        return Step(self)

    def _begin_step(self) -> int:
        """Begin a step, and return its number."""
        if self._timeline.in_step:
            raise RuntimeError(
                "watched.step() is open already: one `with` block is one step, and steps do not "
                "nest"
            )
        number = self._begun - self.warmup_steps
        say(self._tell_begun, number)
        # of a GPU, counting launches kernels, so it becomes rarer: steps 0, 1, 2, 4, 8, ...
        self._reader.counts_padding = self._gpu is None or not number & (number - 1)
        self._hooks.step_begins()
        self._timeline.begin_step()
        return number

    def _end_step(self, number: int, error: BaseException | None) -> None:
        """End the step, and read the times of steps if it is time to."""
        if error is not None:
            # what was called is known to whoever explains the error
            self._tokens(self._timeline.drop_step().passes)
            self._hooks.forget_open()
            say(self._tell_failed, number, error)
            if self._memory_explainer.last is not None:
                UNREPORTED.add(self)
            return
        step = self._timeline.end_step()
        if step is None:
            self._hooks.forget_open()
            return
        self._pending.append(step)
        self._begun += 1
        UNREPORTED.add(self)
        say(self._tell_ended, number)
        now_ns = step.host_ns[-1]
        if len(self._pending) >= MOST_PENDING or now_ns >= self._due_ns:
            self._due_ns = now_ns + READ_EVERY_NS
            self._read()
            self._pauses.take()  # what Python collected while this program read
            self._timeline.resume()

    def data(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches; waiting for each is data. A DataLoader is seen without it."""
        batches = iter(batches)
        while True:
            is_seen = self._timeline.enter(Phase.DATA)
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                if is_seen:
                    self._timeline.leave()
            yield batch

    def remove(self) -> None:
        """Take the hooks away; the times stay, and another step hooks again. Nothing is reported at
        the end of the process.
        """
        UNREPORTED.discard(self)
        self._hooks.detach()

    def _observe(self, observers: list[Observer]) -> None:
        """Let these parts, in this order, look at the steps."""
        self._observers = observers
        self._timeline.told = overriding(observers, "phase_begins")
        self._tell_begun = overriding(observers, "step_begins")
        self._tell_ended = overriding(observers, "step_ended")
        self._tell_read = overriding(observers, "steps_read")
        self._tell_failed = overriding(observers, "step_failed")

    def _read(self) -> None:
        """Compute the times of the steps that the device has done, in order."""
        first, steps = self._num_read - self.warmup_steps, []
        while self._pending and self._pending[0].mark(-1).is_passed():
            pending = self._pending.popleft()
            steps.append(resolved(pending, self._tokens))
            self._timeline.recycle(pending)
        num_warm = self.warmup_steps + self._profiled.has_profiler - len(self.warmup)
        self.warmup += steps[:num_warm]
        measured = steps[num_warm:]
        self.measured += measured
        if self._profiled.has_profiler:
            self._recorded += measured[: PROFILED_STEPS - len(self._recorded)]
        self._num_read += len(steps)
        if self._rank is None and dist.is_available() and dist.is_initialized():
            self._rank = dist.get_rank()
        if steps:
            say(self._tell_read, first, steps)

    def _tokens(self, passes: list[Pass]) -> Tokens:
        """What went through the model in these passes; nothing where reading it fails."""
        try:
            return self._reader.tokens(passes)
        except Exception as error:
            note_trouble(self._reader.tokens, error)
            return NO_TOKENS

    def _settle(self) -> None:
        """Wait until the device has done the steps so far, and read them."""
        if self._pending and self.device is Device.CUDA:
            torch.cuda.synchronize()
        self._read()

    def record(self) -> RunRecord:
        """The record of the steps so far, as of a run of benchmark.py; waits until the device has
        done them.

        Raise RuntimeError before the first step that counts.
        """
        for observer in self._observers:
            observer.finish()
        self._settle()
        steps = self._recorded if self._profiled.has_profiler else list(self.measured)
        if not steps and self._memory_explainer.last is not None:
            return self._failed_record()
        if not steps:
            raise RuntimeError(
                f"watch: no step to report: {len(self.warmup)} of {self.warmup_steps} warm-up "
                "steps are done; watch more steps, or give watch(..., warmup_steps=0)"
            )
        models = [model for reference in self._models if (model := reference()) is not None]
        if models:
            self._num_parameters = _num_parameters(models)
        progress = replace(
            self._progress,
            num_parameters=self._num_parameters,
            warmup=[step.times for step in self.warmup],
            measured=[step.times for step in steps],
            warnings=[],
        )
        telemetry = self._gpu.telemetry() if self._gpu else None
        progress.subject = described(self._loop, steps, self._reader.order)
        measured = all_measurements(steps)
        host_phases = measurements([step.times.host_phases_s for step in steps])
        self._judge(progress, telemetry, measured, host_phases)
        flops, reason = self._flops(steps)
        return replace(
            progress.finished(),
            measurements=measured,
            host_phases=host_phases,
            between_s=tuple(step.between_s for step in steps if step.between_s is not None),
            seen=replace(
                seen_of(steps, self._reader.order),
                flops=flops,
                not_traced=reason,
                slow_steps=self._slow(steps),
                growth=self._growth.growth(self._num_read - self.warmup_steps - len(steps)),
                syncs_per_update=self._syncs.per_update,
                rank=self._ranks.rank(steps),
                out_of_memory=self._memory_explainer.last,
            ),
            memory=self._gpu.memory() if self._gpu else None,
            telemetry=telemetry,
            activity=self._gpu.activity() if self._gpu else None,
        )

    def _failed_record(self) -> RunRecord:
        """The record of a loop whose memory did not suffice before the first step that counts."""
        progress = replace(
            self._progress,
            num_parameters=self._num_parameters,
            warmup=[step.times for step in self.warmup],
            measured=[],
            warnings=[],
        )
        return replace(
            progress.record(Status.OOM),
            failure=self._memory_explainer.failure,
            seen=LoopRecord(out_of_memory=self._memory_explainer.last),
        )

    def _slow(self, steps: list[WatchedStep]) -> tuple[SlowStep, ...]:
        """The slow steps; a profiler slows steps by itself, so that nothing is said of its."""
        if self._profiled.has_profiler:
            return ()
        return self._slow_steps.slow_steps(self.warmup, steps)

    def _flops(self, steps: Collection[WatchedStep]) -> tuple[LoopFlops | None, str]:
        """The FLOPs of the mean of these steps, and why they are not known. The first call traces
        the model, which takes time that is not the loop's.
        """
        num_traced = self._tracer.num_traced
        flops, reason = self._tracer.flops(steps)
        if self._tracer.num_traced != num_traced:
            self._timeline.forget()
        return flops, reason

    def _mfu(self, sums: Sums) -> float | None:
        """MFU of these steps; None before the model was traced, and where FLOPs, precision or the
        device's peak are not known.
        """
        flops, steps = self._tracer.last, self.measured
        if flops is None or self._gpu is None or not steps or not sums.loop_s:
            return None
        precision = steps[-1].tokens.precision
        if precision is None:
            return None
        rate = flops.per_step * sums.steps / sums.loop_s
        return share_of_peak(rate, torch.cuda.get_device_name(), precision)

    def metrics(self) -> dict[str, float]:
        """The means of the measured steps that were read since the last call, for a tracker of
        experiments: times by phase (ms), tokens per second, how many steps were slow, the peak of
        memory, MFU. Empty in the warm-up, and if there was none. Nothing waits for the device; the
        first call traces the model for its FLOPs.
        """
        self._read()
        if self.measured and self._tracer.num_traced == 0:
            self._flops(self.measured)
        numbers = self._live.take()
        if numbers and self._gpu is not None:
            numbers["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return {f"watch/{name}": value for name, value in numbers.items()}

    def answer(self) -> dict[str, Any]:
        """The steps so far in a dict of at most 2,000 tokens that JSON knows: findings, statistics
        in seconds, what was seen, warnings, and the files that have more after a report.
        """
        from ..report.answer import answer_of

        return answer_of(self.record(), record=self._written, page=self._page)

    def budget(
        self,
        *,
        step_ms: float | None = None,
        peak_gib: float | None = None,
        mfu: float | None = None,
        tokens_per_s: float | None = None,
    ) -> list[Verdict]:
        """Raise OverBudgetError if the steps so far take more than the longest mean step or the
        largest peak, or reach less than the least MFU (of 1) or tokens per second.

        A limit is exceeded if the 95 % interval of the mean lies wholly beyond it. What cannot be
        told, as in the warm-up and below 10 steps, is no failure; the verdicts are returned.
        """
        from ..report.configurations import step_results

        limits = Limits(step_ms=step_ms, peak_gib=peak_gib, mfu=mfu, tokens_per_s=tokens_per_s)
        self._settle()
        if not self.measured:
            return []
        record = self.record()
        told = verdicts(record, limits, step_results([record])[0].mfu)
        check(told)
        return told

    def _judge(
        self,
        progress: Progress,
        telemetry: Telemetry | None,
        measured: tuple[Measurement, ...],
        host_phases: tuple[Measurement, ...],
    ) -> None:
        """Add the warnings that follow from the times and the telemetry."""
        if all(measured[-1].times_s):  # a coarse clock may show 0
            launched_s = launch_bound_phases(measured, host_phases)
            progress.warnings += loop_warnings(measured, launched_s)
        unseen = list(self._unseen)
        if all(measurement.phase is not Phase.FORWARD for measurement in measured):
            unseen.append(NO_FORWARD)
        unseen += [f"an error of this program's own: {trouble}" for trouble in TROUBLES]
        for message in unseen:
            progress.warnings.append(RunWarning(code=WarningCode.NOT_SEEN, message=message))
        if any(measurement.phase is Phase.OPTIMIZER for measurement in measured):
            progress.warn_of_short_warmup(len(self.warmup))
        if telemetry is not None:
            progress.warn_if_throttled(telemetry)

    def __str__(self) -> str:
        """The table of the steps so far, with its warnings, as benchmark.py prints it."""
        from ..report.terminal import print_run

        with contextlib.redirect_stdout(io.StringIO()) as printed:
            print_run(self.record())
        return printed.getvalue().rstrip()

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        from ..report.answer import table_html

        self._settle()
        if not self.measured and self._memory_explainer.last is None:
            return f"<p>{len(self.warmup)} of {self.warmup_steps} warm-up steps are done</p>"
        return table_html(self.record())

    def report(self, *, page: bool = True) -> Path | None:
        """Write the record of the steps so far and the page of the loop's directory, print the
        table, take the hooks away, and return the path of the record. Another step hooks again.

        Of several ranks the first one does; the others write only their own times, which readers
        join to the record, and return None. Where a loop ends without it, by an exception, Ctrl-C
        or the end of the process, this is done then without the page.
        """
        self.remove()
        if self._rank:
            self._write_rank()
            return None
        from ..report.terminal import print_measured
        from ..sweep.keep import explain_run
        from ..sweep.store import raw_profile_path

        runs = self.directory / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        earlier, record = self._written, self.record()
        # the profiled steps are those of the first report
        if earlier is not None and self._profiled.has_profiler:
            print_measured(read_record(earlier), runs)
            return earlier
        # where an earlier process has left such a record, this is a repetition of it
        while (path := runs / f"{record.key}.json") != earlier:
            with contextlib.suppress(FileExistsError):
                path.touch(exist_ok=False)  # so that no other process takes this name
                break
            assert record.loop is not None
            record = replace(record, loop=replace(record.loop, repeat=record.loop.repeat + 1))
        self._written = write_record(record, runs)
        if earlier is not None and earlier != path:
            earlier.unlink(missing_ok=True)  # this loop's own, with fewer steps
        if self._profiled.has_profiler:
            self._profiled.move(raw_profile_path(record.subject, runs))
            explain_run(record.subject, runs)
        print_measured(with_other_ranks(record, runs), runs)
        if page:
            self._page = _written_page(self.directory)
        return self._written

    def _write_rank(self) -> None:
        """Write what this rank has seen, unless it was not told of which run it is."""
        self._settle()
        rank = self._ranks.rank(list(self.measured)) if self.measured else None
        if rank is not None and rank.run:
            write_rank(rank, self.directory / "runs")


watch = Watched


def _written_page(directory: Path) -> Path | None:
    """Write the page of the loop's directory, and say where it is; its lack is no failure."""
    from ..report.page.chapters import write_page_of_runs

    try:
        page = write_page_of_runs(directory)
    except Exception as error:  # the record is written, and the loop's own end comes first
        print_aside(f"no page of {directory}: {in_one_line(error)}")
        return None
    print_line(f"page: {page}")
    return page


def _device_of(models: Iterable[nn.Module]) -> torch.device:
    """Where the loop runs: where the first parameter or buffer is that is loaded."""
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            # tensors that are not loaded yet are on "meta", whatever the device
            if tensor.device.type != "meta":
                return tensor.device
    if torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _num_parameters(models: Iterable[nn.Module]) -> int:
    """Elements of all parameters, shared ones once."""
    parameters = {parameter for model in models for parameter in model.parameters()}
    return sum(map(Tensor.numel, parameters))
