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

import atexit
import contextlib
import io
import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import nn

from ..analysis.limits import Limits, Verdict, check, verdicts
from ..config import Device, Phase, Profiler
from ..files import in_one_line
from ..record import RunRecord, read_record, with_other_ranks, write_rank, write_record
from ..subject import WatchedLoop
from ..sweep.store import PROFILE_DIRECTORIES
from ..text import print_aside, print_line
from .hooks import hookable
from .marks import WatchedStep
from .observer import say
from .parts import Parts, device_of

Batch = TypeVar("Batch")

UNREPORTED: set["Watched"] = set()
"""The loops of this process that have had steps since their last report."""
_PROCESS = os.getpid()

FOREIGN_OPTIMIZER = (
    "the optimizer {} is no torch.optim.Optimizer, so its time is in other: its step has no hooks"
)


class Step(contextlib.ContextDecorator):
    """One step of a watched loop, as a context."""

    def __init__(self, watched: "Watched") -> None:
        self._watched, self._parts = watched, watched._parts

    def __enter__(self) -> None:
        parts = self._parts
        if parts.timeline.in_step:
            raise RuntimeError(
                "watched.step() is open already: one `with` block is one step, and steps do not "
                "nest"
            )
        self._number = number = parts.steps.next_number
        say(parts.steps.observers.step_begins, number)
        # what takes time becomes rarer: steps 0, 1, 2, 4, 8, ...
        parts.reader.looks_closely = looks_closely = not number & (number - 1)
        # of a GPU, counting launches kernels
        parts.reader.counts_padding = parts.gpu is None or looks_closely
        parts.hooks.step_begins()
        parts.timeline.begin_step()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        parts = self._parts
        if error is not None:
            # what was called is known to whoever explains the error
            parts.steps.tokens(parts.timeline.drop_step().passes)
            parts.hooks.forget_open()
            say(parts.steps.observers.step_failed, self._number, error)
            if parts.out_of_memory.last is not None:
                UNREPORTED.add(self._watched)
            return
        step = parts.timeline.end_step()
        if step is None:
            parts.hooks.forget_open()
            return
        UNREPORTED.add(self._watched)
        say(parts.steps.observers.step_ended, self._number)
        if parts.steps.ended(step):
            parts.pauses.take()  # what Python collected while this program read
            parts.timeline.resume()


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
        _check_arguments(name, warmup_steps, profile=profile, memory=memory)
        models = (model,) if isinstance(model, nn.Module) else tuple(model)
        hooked, unseen = _hooked(optimizers)
        profiler = Profiler.KINETO if profile else Profiler.NONE
        if memory:
            profiler = Profiler.MEMORY
        self.directory = Path(output) / PROFILE_DIRECTORIES[profiler] / name
        self.device = Device.CUDA if device_of(models).type == "cuda" else Device.CPU
        if memory and self.device is Device.CPU:
            raise ValueError(
                "watch: memory=True needs the model on a GPU, whose allocator it records; got the "
                "CPU"
            )
        self._loop = WatchedLoop(
            name=name, device=self.device, profiler=profiler, warmup_steps=warmup_steps
        )
        self._parts = Parts(models, hooked, self._loop, self.directory, unseen, every)
        self._parts.hooks.attach()
        weakref.finalize(self, self._parts.hooks.detach).atexit = False
        self._written: Path | None = None
        self._page: Path | None = None
        """The files of the last report."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Report what was seen, however the loop ended, and take the hooks away.

        What goes wrong is said in a line: it must not hide the exception that ended the loop.
        """
        try:
            if self in UNREPORTED:
                self.report(page=False)  # a page takes seconds, and the process may be about to end
        except Exception as error:
            print_aside(f"no report of the loop: {error}")
        finally:
            self.remove()

    def step(self) -> Step:
        """Around one step of the loop. A step that ends by an exception is not counted."""
        return Step(self)

    def data(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches; waiting for each is data. A DataLoader is seen without it."""
        batches = iter(batches)
        while True:
            is_seen = self._parts.timeline.enter(Phase.DATA)
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                if is_seen:
                    self._parts.timeline.leave()
            yield batch

    def remove(self) -> None:
        """Take the hooks away; the times stay, and another step hooks again. Nothing is reported at
        the end of the process.
        """
        UNREPORTED.discard(self)
        self._parts.hooks.detach()

    @property
    def warmup(self) -> list[WatchedStep]:
        """The steps that do not count."""
        return self._parts.steps.warmup

    @property
    def measured(self) -> deque[WatchedStep]:
        """The steps after these that were read, at most the last ones of a long loop."""
        return self._parts.steps.measured

    def record(self) -> RunRecord:
        """The record of the steps so far, as of a run of benchmark.py; waits until the device has
        done them.

        Raise RuntimeError before the first step that counts.
        """
        return self._parts.record()

    def metrics(self) -> dict[str, float]:
        """The means of the measured steps that were read since the last call, for a tracker of
        experiments: times by phase (ms), tokens per second, how many steps were slow, the peak of
        memory, MFU. Empty in the warm-up, and if there was none. Nothing waits for the device; the
        first call traces the model for its FLOPs.
        """
        self._parts.steps.read()
        if self.measured and self._parts.tracer.num_traced == 0:
            self._parts.flops(self.measured)
        numbers = self._parts.live.take()
        if numbers and self._parts.gpu is not None:
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
        self._parts.steps.settle()
        if not self.measured:
            return []
        record = self.record()
        told = verdicts(record, limits, step_results([record])[0].mfu)
        check(told)
        return told

    def __str__(self) -> str:
        """The table of the steps so far, with its warnings, as benchmark.py prints it."""
        from ..report.terminal import print_run

        with contextlib.redirect_stdout(io.StringIO()) as printed:
            print_run(self.record())
        return printed.getvalue().rstrip()

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        from ..report.answer import table_html

        self._parts.steps.settle()
        if not self.measured and self._parts.out_of_memory.last is None:
            return f"<p>{len(self.warmup)} of {self._loop.warmup_steps} warm-up steps are done</p>"
        return table_html(self.record())

    def report(self, *, page: bool = True) -> Path | None:
        """Write the record of the steps so far and the page of the loop's directory, print the
        table, take the hooks away, and return the path of the record. Another step hooks again.

        Of several ranks the first one does; the others write only their own times, which readers
        join to the record, and return None. Where a loop ends without it, by an exception, Ctrl-C
        or the end of the process, this is done then without the page.
        """
        self.remove()
        if not self._parts.ranks.is_first:
            self._write_rank()
            return None
        from ..report.terminal import print_measured
        from ..sweep.keep import explain_run
        from ..sweep.store import raw_profile_path

        runs = self.directory / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        earlier, record = self._written, self.record()
        # the profiled steps are those of the first report
        if earlier is not None and self._parts.profiled.has_profiler:
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
        if self._parts.profiled.has_profiler:
            self._parts.profiled.move(raw_profile_path(record.subject, runs))
            explain_run(record.subject, runs)
        print_measured(with_other_ranks(record, runs), runs)
        if page:
            self._page = _written_page(self.directory)
        return self._written

    def _write_rank(self) -> None:
        """Write what this rank has seen, unless it was not told of which run it is."""
        self._parts.steps.settle()
        rank = self._parts.ranks.rank(list(self.measured)) if self.measured else None
        if rank is not None and rank.run:
            write_rank(rank, self.directory / "runs")


watch = Watched


@atexit.register
def _report_all() -> None:
    """Report the loops whose report did not come before the end of the process."""
    if os.getpid() != _PROCESS:  # a child that was forked shares none of the loops
        return
    for loop in list(UNREPORTED):
        loop.__exit__()


def _check_arguments(name: str, warmup_steps: int, *, profile: bool, memory: bool) -> None:
    """Raise ValueError for arguments of `watch` that cannot be obeyed."""
    if not name.isidentifier():
        raise ValueError(
            f"watch: name must be letters, digits and underscores, as in my_model, got {name!r}"
        )
    if warmup_steps < 0:
        raise ValueError(f"watch: warmup_steps must be at least 0, got {warmup_steps}")
    if profile and memory:
        raise ValueError("watch: profile and memory record different steps: give one of them")


def _hooked(optimizers: Any) -> tuple[list[torch.optim.Optimizer], list[str]]:  # noqa: ANN401
    """The optimizers of PyTorch among one or several, and what is said of the others."""
    if isinstance(optimizers, torch.optim.Optimizer) or not isinstance(optimizers, Iterable):
        optimizers = (optimizers,)
    hooked, unseen = [], []
    for optimizer in optimizers:
        of_pytorch = hookable(optimizer)
        if of_pytorch is None:
            unseen.append(FOREIGN_OPTIMIZER.format(type(optimizer).__name__))
        else:
            hooked.append(of_pytorch)
    return hooked, unseen


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
