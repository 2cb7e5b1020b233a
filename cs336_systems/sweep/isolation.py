"""Worker processes as their parent handles them: started from a preloaded fork server, watched, and
killed.

Sweeps and studies start, wait for and kill their workers here only.
"""

import contextlib
import functools
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import psutil

from ..interrupt import STOP_SIGNALS, end_at_once
from ..measure.nvml import Gpu
from ..record import Failure, Status
from ..subject import Subject
from ..temporary import shared_directory
from .process import FORKER_VARIABLE, child_environment
from .store import SweepError

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext  # which Windows lacks

LOG_TAIL_BYTES = 16 * 1024
"""Most bytes of the end of a worker's output that are kept."""
_CHUNK_BYTES = 1 << 16
_CHUNKS_AT_ONCE = 64
"""Most chunks in one read of a log, so that a worker that prints endlessly does not delay the
checks of time limits.
"""
_ANSWER_S = 10.0
"""How long the fork server may take to report the end of a worker before it is killed."""
START_S = 600.0
"""How long the fork server may take to start a worker, imports included, where the user has
given no time limit.
"""
_LEAST_START_S = 60.0
"""How long it may take at least: importing PyTorch from a slow disk takes half a minute, however
short the runs are.
"""
_LONGEST_DIRECTORY = 80
"""Longest name of the temporary directory, in bytes; with that of a socket in it, the kernel
takes 107.
"""
_MAX_PID = 2**22
"""Largest id of a process on Linux."""
_END_S = 60.0
"""How long a process that was killed may take to end, because it frees the memory of its GPU
first.
"""
_DEATH_S = 10.0
"""How long killed processes may take to end. One that waits for a device that hangs does not end
at all.
"""

_PRELOAD = ("cs336.sweep.server", "cs336.sweep.worker")
"""Imported once for all workers, in this order. It must not touch CUDA."""
EXPLAINING = ("cs336.analysis.kernels.explain", "cs336.analysis.memory.explain")
"""Modules that explain profiles, none of which needs torch."""
Entry: TypeAlias = Callable[[Any, Path, Connection], None]
"""Function that a worker calls with the subject of a record, the directory of records, and the
connection for its output.
"""


@functools.cache
def fork_server() -> "ForkServerContext":
    """The context whose server imports torch once and never touches CUDA, so that a fork of it
    is a fresh process.
    """
    shared_directory()
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOAD])
    return context


def preload(*modules: str) -> None:
    """Have the fork server import these modules too when it starts, so that not every run
    imports them itself.
    """
    fork_server().set_forkserver_preload([*_PRELOAD, *modules])


def preload_to_explain() -> None:
    """Have the fork server import only what explains profiles when it starts: torch takes
    seconds to import.
    """
    fork_server().set_forkserver_preload([_PRELOAD[0], *EXPLAINING])


def ensure_fork_server() -> None:
    """Start the fork server unless it is running, with signals blocked until it ignores them.

    Its environment lets it find the package where this process found it: before Python 3.12.3 it
    does not get `sys.path`, and without its preload every worker would take seconds to start.
    """
    fork_server()
    before = dict(os.environ)
    wanted = child_environment() | {FORKER_VARIABLE: str(os.getpid())}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    os.environ.update(wanted)
    try:
        _ensure_tracker()  # first, because starting it unblocks signals
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        with _short_temporary_directory():
            forkserver.ensure_running()
    finally:
        for name in wanted.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def _short_temporary_directory() -> Iterator[None]:
    """Give the temporary directory a short name where it leaves no room for that of the fork
    server's socket.
    """
    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    directory = shared_directory()
    if len(os.fsencode(directory)) > _LONGEST_DIRECTORY:
        # stays open as long as the socket
        settings["tempdir"] = f"/proc/self/fd/{os.open(directory, os.O_RDONLY)}"
    try:
        yield
    finally:
        settings["tempdir"] = directory


def _ensure_tracker() -> None:
    """Start multiprocessing's resource tracker unless it is running, with its warnings off.

    Workers are killed, so semaphores of the compiler are left; the tracker would warn of each that
    it removes.
    """
    sys.warnoptions.append("ignore:resource_tracker")
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove("ignore:resource_tracker")


def start(process: BaseProcess, timeout_s: float | None = None) -> None:
    """Start the process from the fork server; if that fails, from a second one; then raise
    SweepError.

    It is raised too if a fork server does not start the process in time, with what the server does.
    """
    limit_s = max(START_S if timeout_s is None else timeout_s, _LEAST_START_S)
    for _ in range(2):
        ensure_fork_server()
        server = _server()
        try:
            with _time_limit(limit_s):
                process.start()
            if _is_worker(process.pid, server):
                return
            _kill_server(server)
            raise SweepError(
                "the process that starts the workers sent no process id: what does it import?"
            )
        except TimeoutError as error:
            state = psutil.Process(server).status()
            _kill_server(server)
            raise SweepError(
                f"the process that starts the workers, whose state was {state!r}, started none "
                f"within {limit_s:g} s: see whether `python -c 'import torch'` ends, and run the "
                "same command again, with a longer --timeout-s if it takes so long"
            ) from error
        except FileNotFoundError as error:  # the fork server's socket
            raise SweepError(
                f"{get_temp_dir()}: these temporary files were removed while they were in use; "
                "have TMPDIR left alone and run the same command again"
            ) from error
        except (EOFError, ConnectionError) as error:
            reason = error
            _kill_server(server)  # a server that is still ending would be used again
    raise SweepError(
        "the process that starts the workers died; run the same command again"
    ) from reason


def join(process: BaseProcess) -> int:
    """Wait for the end of a process that has ended or was killed, and return its exit code,
    negative for a signal.

    A fork server that does not report it is killed; the code is then 255.
    """
    process.join(_ANSWER_S)
    if process.exitcode is None and _is_running(process):
        process.join(_END_S)
    if process.exitcode is None:
        _kill_server(_server())
        process.join(_ANSWER_S)
    return 255 if process.exitcode is None else process.exitcode


@contextlib.contextmanager
def _time_limit(limit_s: float) -> Iterator[None]:
    """Raise TimeoutError in this context, which must be in the main thread, once the time is over.

    By an alarm: multiprocessing waits for the fork server without a limit, which cannot be killed
    while it waits for some file systems.
    """

    def end(*_: object) -> NoReturn:
        """Signal handler: end what runs by TimeoutError."""
        raise TimeoutError

    handler = signal.signal(signal.SIGALRM, end)
    timer = signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _is_worker(pid: int | None, server: int) -> bool:
    """Whether a process with this id may be one that the fork server `server` started, or one that
    has ended already.
    """
    if pid is None or not 0 < pid <= _MAX_PID:
        return False
    try:
        # the fork server may have ended too
        return psutil.Process(pid).ppid() in (server, os.getpid(), 1)
    except psutil.NoSuchProcess:
        return True


def _is_running(process: BaseProcess) -> bool:
    """Whether the process has not ended yet; one that has ended may still wait for the fork
    server to reap it.
    """
    try:
        return bool(psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _server() -> int:
    """Process id of the fork server."""
    server: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return server


def _kill_server(server: int) -> None:
    """Kill the fork server, and wait until it is dead, unless it waits for a device;
    multiprocessing reaps it.
    """
    deadline = monotonic() + _DEATH_S
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(server, signal.SIGKILL)
        while (
            os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
            and monotonic() < deadline
        ):
            time.sleep(0.01)


class WorkerProcess:
    """A process in a session of its own that calls `entry` with `args` and its log; the end of its
    output is kept.

    `entry` begins with `begin_worker`, and imports what it needs itself, because the parent must
    not import torch.
    """

    def __init__(
        self,
        entry: Callable[..., None],
        *args: object,
        name: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Start a process that runs `entry(*args, log)`, where `log` is the end of a pipe to write
        its output to; starting it may take `timeout_s` seconds.
        """
        self._tail = b""
        self._exit_code: int | None = None
        self.log_closed = False
        context = fork_server()
        self.log, log_of_child = context.Pipe(duplex=False)
        os.set_blocking(self.log.fileno(), False)
        self.process: BaseProcess = context.Process(
            target=entry, args=(*args, log_of_child), name=name
        )
        start(self.process, timeout_s)
        self.started = monotonic()
        log_of_child.close()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start, by a monotonic clock."""
        return monotonic() - self.started

    def drain(self) -> None:
        """Read the worker's output, keep the end of it, and note when every writer has closed
        the log.
        """
        for _ in range(_CHUNKS_AT_ONCE):
            try:
                chunk = os.read(self.log.fileno(), _CHUNK_BYTES)
            except BlockingIOError:
                return
            if not chunk:
                self.log_closed = True
                return
            self._tail = (self._tail + chunk)[-LOG_TAIL_BYTES:]

    def log_tail(self) -> str | None:
        """End of the worker's output, or None if it printed nothing."""
        text = self._tail.decode(errors="replace").replace("\0", "\\0").strip()
        return text or None

    def last_line(self) -> str:
        """Last line of the worker's output; empty if it printed nothing."""
        return self._tail.decode(errors="replace").strip().rpartition("\n")[2]

    def kill(self) -> None:
        """Kill the worker, its process group and all its descendants."""
        pid = self.process.pid if self._exit_code is None else None
        if pid is not None:
            descendants = []
            with contextlib.suppress(psutil.NoSuchProcess):
                descendants = psutil.Process(pid).children(recursive=True)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                if self.process.is_alive():
                    os.kill(pid, signal.SIGKILL)
            for descendant in descendants:
                with contextlib.suppress(psutil.NoSuchProcess):
                    descendant.kill()

    def reap(self) -> int:
        """Wait for the end, kill what the worker left behind, and return its exit code, negative
        for a signal.
        """
        if self._exit_code is not None:
            return self._exit_code
        code = join(self.process)
        self.kill()
        kill_orphans()
        self.drain()
        self.log.close()
        self._exit_code = code
        self.process.close()
        return code

    def failure(self, exit_code: int, timeout_s: float | None = None) -> tuple[Status, Failure]:
        """Why a reaped worker gave no result; `timeout_s` is the time limit where it was killed
        at that limit.
        """
        if timeout_s is not None:
            status = Status.TIMEOUT
            message = f"no result within {timeout_s:g} s; raise --timeout-s if it needs longer"
            return status, Failure(message=message, log_tail=self.log_tail())
        status, failure = failure_of(exit_code)
        message = failure.message if exit_code < 0 else f"{failure.message} and gave no result"
        return status, replace(failure, message=message, log_tail=self.log_tail())


def wait_for_workers(
    workers: Sequence[WorkerProcess], others: Sequence[Connection | int], timeout_s: float | None
) -> list[object]:
    """Wait until a worker prints or ends, one of `others` is readable, or the time is over; read
    the workers' output.

    Returns what is ready; for a worker that has ended, this is its sentinel.
    """
    printing = [worker for worker in workers if not worker.log_closed]
    sentinels = [worker.process.sentinel for worker in workers]
    ready = wait([*sentinels, *(worker.log for worker in printing), *others], timeout_s)
    for worker in printing:
        worker.drain()
    return [*ready]


class Worker(WorkerProcess):
    """One run, measured or explained by `entry` in a slot for each of `gpus`, or in one on the CPU,
    which is None.
    """

    def __init__(
        self,
        subject: Subject,
        directory: Path,
        entry: Entry,
        timeout_s: float,
        gpus: Sequence[Gpu | None],
    ) -> None:
        """Start a process that measures `subject` into `directory` on these GPUs."""
        name = subject.key
        super().__init__(entry, subject, directory.absolute(), name=name, timeout_s=timeout_s)
        self.subject = subject
        self.gpus = gpus
        self.explains = False
        """Whether it explains the run's profile, and does not measure."""


def failure_of(exit_code: int) -> tuple[Status, Failure]:
    """Status and message for a process that ended without a result, by its exit code, which is
    negative for a signal.
    """
    name = signal_name(-exit_code) if exit_code < 0 else None
    is_killed = exit_code in (-signal.SIGKILL, -signal.SIGSTOP)
    status = Status.KILLED if is_killed else Status.CRASHED
    return status, Failure(message=end_in_words(exit_code), signal=name)


def end_in_words(exit_code: int) -> str:
    """How a process that left no result ended, in words: by which signal, or with which exit
    code.
    """
    if exit_code == -signal.SIGKILL:
        return "killed by SIGKILL: by a person, or by the system when memory ran out (see dmesg)"
    if exit_code == -signal.SIGSTOP:
        return "was stopped by SIGSTOP, and did not go on"
    return (
        f"died of {signal_name(-exit_code)}" if exit_code < 0 else f"ended with status {exit_code}"
    )


def signal_name(number: int) -> str:
    """`SIGSEGV`, or `signal 40` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:  # most of the real-time signals have no name
        return f"signal {number}"


_own_children: set[psutil.Process] = set()


def spare_children() -> None:
    """Exclude the present children of this process from `kill_orphans`.

    Call it in a process that has measured, in which a model or the compiler may have started
    children.
    """
    _own_children.update(psutil.Process().children())


def kill_orphans() -> None:
    """Kill and reap processes that dead workers left and that became children of this one (a child
    subreaper).

    The fork server and the resource tracker, which multiprocessing starts, share this process's
    session; a worker's descendants do not, because a worker leads a session of its own.
    """
    deadline = monotonic() + _DEATH_S
    while strangers := [child for child in psutil.Process().children() if _is_stranger(child)]:
        for stranger in strangers:
            with contextlib.suppress(psutil.Error):
                stranger.kill()
        psutil.wait_procs(strangers, timeout=max(0.0, deadline - monotonic()))
        if monotonic() > deadline:
            return


def _is_stranger(process: psutil.Process) -> bool:
    """Whether the process has not ended, belongs to another session than this one, and is not
    spared (`spare_children`).
    """
    try:
        is_in_other_session = os.getsid(process.pid) != os.getsid(0)
    except ProcessLookupError:
        return False
    return is_in_other_session and process not in _own_children


_ONE_REQUEST_S = 0.3
"""Signals this close together count as one request: `timeout` and a closing terminal send theirs
twice.
"""


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP and wakes the sweep's loop; the second signal ends the
    process at once.

    A signal that was ignored when the process started, as under nohup, stays ignored.
    """

    def __init__(self) -> None:
        """Start with no signal received, and with a pipe that wakes the waiting process when one
        comes.
        """
        self.count = 0
        self.at_once = True
        """Whether the first signal ends the process at once too: set until a worker has started."""
        self._last = -math.inf
        self.workers: list[Worker] = []
        self.wakeup, self._write = os.pipe()

    def __enter__(self) -> "Interrupts":
        """Handle the signals that stop a sweep, but for those that this process ignores."""
        os.set_blocking(self._write, False)
        handled = [
            number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
        ]
        self._previous = {number: signal.signal(number, self._handle) for number in handled}
        self._previous_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the earlier handlers; a signal that may be the second half of one request is
        awaited first.
        """
        time.sleep(max(0.0, self._last + _ONE_REQUEST_S - monotonic()))
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self.wakeup)
        os.close(self._write)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        """Count a signal; the second, and with `at_once` the first, ends the process."""
        if monotonic() - self._last < _ONE_REQUEST_S:
            return
        if self.at_once:
            end_at_once()
        self._last = monotonic()
        self.count += 1
        if self.count > 1:
            for worker in self.workers:
                worker.kill()
            end_at_once()
