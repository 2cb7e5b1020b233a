"""A sweep: a grid of runs, each in a fresh process. Every run leaves a record, failed runs too.

The directory of records is the whole state, so an interrupted sweep is resumed by starting it
again. A run that has a result (`ok` or `oom`) is not repeated; one that crashed, hung or was killed
is, because it may end well the next time. A profiled run is explained afterwards in another
process. If that fails, or the explanation is lost, the raw profile is explained again.
"""

import contextlib
import functools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic

from ..analysis.kernels.classes import KernelRules
from ..analysis.warnings import judged
from ..config import CompileMode, Device, Mode, OptimizerKind, Parallel, Profiler, RunConfig
from ..files import in_one_line
from ..measure.environment import identity
from ..measure.nvml import Gpu, alike, visible_gpus
from ..posix_needed import IS_POSIX
from ..record import RunRecord, Status, load_records
from ..subject import Subject
from . import isolation, keep, store
from .process import NOT_EXPLAINED, RECORD_NOT_WRITTEN, adopt_orphans

_TICK_S = 1.0
"""Seconds between two wakes of the sweep while nothing happens: seldom, because timed runs share
the host.
"""


EXPLAIN_S = 600.0
"""Longest time to explain a profile again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a sweep did."""

    records: tuple[RunRecord, ...]
    """Every record in the directory, including those of earlier sweeps."""
    measured: tuple[RunRecord, ...]
    """Records that this sweep added."""
    unexplained: tuple[Subject, ...] = ()
    """Profiled runs in the directory that have no readable explanation."""
    interrupted: bool


def run_sweep(
    configs: Sequence[RunConfig],
    directory: Path,
    listener: keep.Listener,
    *,
    timeout_s: float = 600.0,
    fresh: bool = False,
    allow_mixed: bool = False,
) -> Outcome:
    """Measure those of `configs` that have no result yet in `directory`, whose lock the caller
    holds.

    Raises SweepError if the directory cannot be written, if its records come from other hardware or
    software (unless `allow_mixed`) or from a later version of this program, and if the disk fills
    up; LockedError if another sweep uses a GPU.
    """
    runs = store.make_writable(directory / "runs")
    adopt_orphans()
    with contextlib.ExitStack() as stack:
        gpus = _gpus(configs)
        needed = max(map(num_slots, configs), default=0)
        if needed > len(gpus):
            raise store.SweepError(
                f"a run on {needed} ranks needs {needed} GPUs of one kind, found {len(gpus)}"
            )
        stack.enter_context(store.exclusive_gpus(gpus))
        present = identity(configs[0].device, gpus[0]) if configs else None
        keeper, todo, unexplained, _ = keep.resume(
            configs, runs, listener, fresh=fresh, allow_mixed=allow_mixed, present=present
        )
        if todo:
            isolation.preload(*modules_of([*todo, *unexplained]))
        elif unexplained:
            isolation.preload_to_explain()
        interrupts = stack.enter_context(isolation.Interrupts())
        if todo:
            isolation.ensure_fork_server()
            listener.importing()
        Loop(keeper, gpus, timeout_s, interrupts, deque(unexplained)).run(todo)
        return outcome(keeper, interrupted=interrupts.count > 0)


def outcome(keeper: keep.Keeper, *, interrupted: bool) -> Outcome:
    """What a sweep that ends has done; writes its environment.json."""
    every, _ = load_records(keeper.runs)
    store.write_environment(every, keeper.runs.parent)
    return Outcome(
        records=tuple(every),
        measured=tuple(keeper.measured),
        unexplained=tuple(
            record.subject for record in every if keep.lacks_explanation(record, keeper.runs)
        ),
        interrupted=interrupted,
    )


def explain_again(
    records: Sequence[RunRecord],
    runs: Path,
    listener: keep.Listener,
    rules: KernelRules | None = None,
) -> tuple[Subject, ...]:
    """Make the missing explanations of those of `records` in `runs` that have a raw profile, one
    after the other; measure nothing.

    With `rules`, which tell the class of a kernel by its name, those with a trace of kernels are
    explained by them even if they have an explanation. Return the runs that were to be explained
    and have no explanation in the end. Raises KeyboardInterrupt if a signal stops it.
    """
    waiting = []
    for record in records:
        is_trace = record.subject.profiler is not Profiler.MEMORY
        has_new_rules = rules is not None and is_trace
        is_redone = has_new_rules and keep.raw_profile(record, runs) is not None
        if is_redone or keep.can_be_explained(record, runs):
            waiting.append(record.subject)
    if waiting and not IS_POSIX:
        _explain_here(waiting, runs, listener, rules)
    elif waiting:
        isolation.preload_to_explain()
        isolation.spare_children()
        adopt_orphans()
        with isolation.Interrupts() as interrupts:
            loop = Loop(
                keeper=keep.Keeper(runs, listener),
                gpus=(None,),  # one slot, which needs no GPU
                timeout_s=EXPLAIN_S,
                interrupts=interrupts,
                unexplained=deque(waiting),
                rules=rules,
            )
            loop.run(todo=())
            if interrupts.count:
                raise KeyboardInterrupt
    return tuple(subject for subject in waiting if not keep.has_explanation(subject, runs))


def _explain_here(
    subjects: Sequence[Subject], runs: Path, listener: keep.Listener, rules: KernelRules | None
) -> None:
    """Explain the runs in this process, where the system has no fork that makes workers."""
    for subject in subjects:
        listener.explaining(subject)
        failure = None
        try:
            keep.explain_run(subject, runs, rules)
        except Exception as error:  # whatever the profile holds, the others are explained
            failure = in_one_line(error)
        listener.explained(subject, failure)


@dataclass(slots=True)
class Loop:
    """Keeps one worker per slot running until nothing is left to do or a signal interrupts the
    sweep.
    """

    keeper: keep.Keeper
    gpus: Sequence[Gpu | None]
    timeout_s: float
    interrupts: isolation.Interrupts
    unexplained: deque[Subject] = field(default_factory=deque)
    """Runs to explain. A free slot explains the first of them before it measures another run."""
    explains: bool = True
    """Whether the raw profiles of runs are explained here after they have been measured."""
    rules: KernelRules | None = None
    """Rules for names of kernels, by which traces are explained."""
    waiting: deque[RunConfig] = field(default_factory=deque)
    """Runs to measure."""
    free: list[Gpu | None] = field(init=False)

    def __post_init__(self) -> None:
        """Begin with all GPUs free."""
        self.free = list(self.gpus)

    @property
    def is_busy(self) -> bool:
        """Whether a run waits, is being measured, or is being explained."""
        return bool(self.waiting or self.unexplained or self.interrupts.workers)

    def run(self, todo: Sequence[RunConfig]) -> None:
        """Measure the configurations `todo`, explain their profiles, and leave no process
        behind.
        """
        self.waiting.extend(todo)
        ticked = monotonic()
        try:
            while self.is_busy and not self.interrupts.count:
                self.step(_TICK_S)
                # output of a worker wakes the loop far more often
                if monotonic() - ticked >= _TICK_S:
                    ticked = monotonic()
                    self.keeper.listener.tick()
        finally:
            self.end()

    def step(self, patience_s: float) -> None:
        """Start workers in free slots, wait at most `patience_s` seconds for an event, and keep the
        results of workers that have ended.
        """
        while (self.waiting or self.unexplained) and not self.interrupts.count:
            count = 1 if self.unexplained else num_slots(self.waiting[0])
            if len(self.free) < count:
                break
            gpus, self.free = self.free[:count], self.free[count:]
            self._start(gpus)
        for worker in self._ended(patience_s):
            # sorted, so that each of several runs on the same ranks gets the same GPUs in the same
            # order
            self.free = sorted([*self.free, *worker.gpus], key=self.gpus.index)
            self.interrupts.workers.remove(worker)

    def end(self) -> None:
        """Kill the workers that still run."""
        for left in self.interrupts.workers:
            left.kill()
            left.reap()
        isolation.kill_orphans()

    def _start(self, gpus: Sequence[Gpu | None]) -> None:
        """Start a worker on these GPUs: for the first profile that waits to be explained or, if
        none does, for the first run that waits to be measured.
        """
        runs, listener = self.keeper.runs, self.keeper.listener
        explains = bool(self.unexplained)
        subject: Subject
        if explains:
            subject = self.unexplained.popleft()
            entry = functools.partial(keep.explain_in_worker, rules=self.rules)
            tell = functools.partial(listener.explaining, subject)
        else:
            subject = self.waiting.popleft()
            (runs / f"{subject.key}.json").unlink(missing_ok=True)
            uuids = [gpu.uuid for gpu in gpus if gpu]
            entry = functools.partial(measure_in_worker, gpu_uuids=uuids)
            tell = functools.partial(listener.started, subject, gpus[0])
        worker = isolation.Worker(subject, runs, entry, self.timeout_s, gpus)
        worker.explains = explains
        self.interrupts.workers.append(worker)
        self.interrupts.at_once = False
        tell()

    def _ended(self, patience_s: float) -> Iterator[isolation.Worker]:
        """Wait for an event, then yield the workers that have ended, after their results have
        been kept.
        """
        working = list(self.interrupts.workers)
        left_s = min(
            [patience_s, *(max(0.0, self.timeout_s - worker.elapsed_s) for worker in working)]
        )
        ready = isolation.wait_for_workers(working, [self.interrupts.wakeup], left_s)
        if self.interrupts.count:
            return  # the signal may have ended the workers too, which is no failure of their runs
        for worker in working:
            timed_out = worker.elapsed_s >= self.timeout_s
            if worker.process.sentinel in ready or timed_out:
                timed_out = timed_out and worker.process.is_alive()
                if timed_out:
                    worker.kill()
                exit_code = worker.reap()
                if worker.explains:
                    why = self._why_unexplained(worker, exit_code, timed_out)
                    self.keeper.listener.explained(worker.subject, why)
                else:
                    record = self._collect(worker, exit_code, timed_out)
                    self.keeper.finish(record)
                    if self.explains:
                        self.explain_later(record)
                yield worker

    def explain_later(self, record: RunRecord) -> None:
        """Queue the raw profile of a run that has ended to be explained, if there is one."""
        if keep.can_be_explained(record, self.keeper.runs):
            self.unexplained.append(record.subject)

    def _why_unexplained(
        self, worker: isolation.Worker, exit_code: int, timed_out: bool
    ) -> str | None:
        """In one line, why a worker that has ended left no explanation, and what to do; None if
        it left one.
        """
        if keep.has_explanation(worker.subject, self.keeper.runs):
            return None
        if timed_out:
            why = f"not done within {self.timeout_s:g} s"
        elif exit_code == NOT_EXPLAINED:
            why = worker.last_line()
        else:
            why = isolation.end_in_words(exit_code)
        return (
            f"{why}; the record and the raw profile are kept: `cs336 report "
            f"{self.keeper.runs.parent}` tries again"
        )

    def _collect(self, worker: isolation.Worker, exit_code: int, timed_out: bool) -> RunRecord:
        """The record of a worker that has ended: the one that it wrote, or one of its failure."""
        config = worker.subject
        assert isinstance(config, RunConfig), "a watched loop is only explained"
        path = self.keeper.runs / f"{config.key}.json"
        if path.exists():
            record = self.keeper.read(config, worker.elapsed_s, worker.log_tail())
            if record.status is Status.INVALID:
                return record
            if exit_code or timed_out:  # the worker may have ended before it judged the times
                record = self.keeper.write(judged(record))
            if record.failed_rank is not None and record.failure is not None:
                failure = replace(record.failure, log_tail=worker.log_tail())
                record = self.keeper.write(replace(record, failure=failure))
            return record
        if exit_code == RECORD_NOT_WRITTEN and not timed_out:
            why = worker.last_line()
            raise store.SweepError(f"the record of {config.key} could not be written: {why}")
        status, failure = worker.failure(exit_code, self.timeout_s if timed_out else None)
        return self.keeper.fail(config, status, failure, worker.elapsed_s)


def measure_in_worker(
    config: RunConfig, runs: Path, log: Connection, gpu_uuids: Sequence[str]
) -> None:
    """Entry of a worker that measures. It imports torch itself, because this module's own
    process must not.
    """
    from . import worker

    worker.main(config, runs, log, gpu_uuids)


def modules_of(configs: Sequence[RunConfig]) -> list[str]:
    """Modules that only some runs need, and these do, for the fork server to import once.

    Dynamo and torch.compile's backend take 2 s each to import. The backend is included only if runs
    compile on a CPU, because on a GPU its imports could touch CUDA.
    """
    modules: list[str] = []
    if any(config.profiler is not Profiler.NONE for config in configs):
        modules += isolation.EXPLAINING
    if any(config.profiler is Profiler.MEMORY for config in configs):
        modules.append("cs336.measure.memory")
    if any(config.needs_fast_model or config.cuda_graph for config in configs):
        modules += ["cs336.model.fast.model", "cs336.model.fast.step_graph"]
    if any(config.is_shared for config in configs):
        modules.append("cs336.parallel.ways")
    if any(map(_uses_dynamo, configs)):
        modules.append("torch._dynamo")
    if any(
        config.compile is not CompileMode.NONE and config.device is Device.CPU for config in configs
    ):
        modules.append("torch._inductor.compile_fx")
    if any(config.parallel is Parallel.FSDP2 for config in configs):
        modules.append("torch.distributed.fsdp")
    return modules


def _uses_dynamo(config: RunConfig) -> bool:
    """Whether the run imports Dynamo, to compile or as PyTorch's optimizers, checkpoints,
    profiler and modes do.
    """
    optimizes = (
        config.mode is Mode.TRAIN
        and not config.cast_once
        and config.optimizer is not OptimizerKind.ADAMW
    )
    # ranks count what they send in a mode
    is_observed = config.profiler is Profiler.KINETO or config.is_shared
    return (
        config.compile is not CompileMode.NONE
        or config.checkpoint_blocks > 0
        or is_observed
        or optimizes
    )


def measure_one(
    config: RunConfig,
    runs: Path,
    *,
    timeout_s: float = 600.0,
    gpus: Sequence[Gpu | None] = (),
    explains: bool = True,
) -> RunRecord:
    """Measure one run in a worker, as a sweep does; write its record to `runs` and return it.

    Used for a run on several ranks, and on machines of a cluster. The caller must hold the locks of
    `gpus`, or else of the GPUs that a sweep of this run would take. Raises KeyboardInterrupt if a
    signal stops it.
    """
    isolation.preload(*modules_of([config]))
    isolation.spare_children()
    adopt_orphans()
    with isolation.Interrupts() as interrupts:
        keeper = keep.Keeper(runs, keep.Listener())
        gpus = gpus or _gpus([config])
        Loop(keeper, gpus, timeout_s, interrupts, explains=explains).run([config])
        if interrupts.count:
            raise KeyboardInterrupt
    return keeper.measured[0]


def num_slots(config: RunConfig) -> int:
    """How many of a sweep's slots the run takes: a GPU for each rank, or the CPU."""
    return config.ranks if config.device is Device.CUDA else 1


def _gpus(configs: Sequence[RunConfig]) -> tuple[Gpu | None, ...]:
    """One slot for each visible GPU of the same kind as the first, or a single slot for the CPU."""
    if not any(config.device is Device.CUDA for config in configs):
        return (None,)
    return alike(visible_gpus()) or (None,)


def gpus_left_out(configs: Sequence[RunConfig]) -> tuple[Gpu, ...]:
    """Visible GPUs that a sweep leaves idle, because times of different kinds of GPU do not
    belong in one table.
    """
    used = _gpus(configs)
    if used == (None,):
        return ()
    return tuple(gpu for gpu in visible_gpus() if gpu not in used)
