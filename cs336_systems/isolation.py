"""A worker process as the sweep sees it: started from a preloaded fork server, watched, killed with all it started."""

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic

import psutil

from cs336_systems.config import RunConfig
from cs336_systems.process import FORKER_VARIABLE, STOP_SIGNALS, child_environment

LOG_TAIL_BYTES = 16 * 1024
"""How much of the end of a worker's output is kept."""
_CHUNK_BYTES = 1 << 16
_CHUNKS_AT_ONCE = 64
"""Bound on one reading, so that a worker that prints without end cannot keep the sweep from its clock."""
_GENERATIONS = 100
"""How often to look again: the children of an orphan become orphans when it is killed."""


_PRELOAD = "cs336_systems.preload"


@functools.cache
def fork_server() -> ForkServerContext:
    """The context whose server imports torch once and never touches CUDA, so that a fork of it is a fresh process."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOAD])
    return context


def preload(*modules: str) -> None:
    """Let the fork server, unless it is running, import these too: every run that needs them would import them anew."""
    fork_server().set_forkserver_preload([_PRELOAD, *modules])


def ensure_fork_server() -> None:
    """Start the fork server if none is alive, deaf to signals until it ignores them.

    It finds the package where this process found it: before Python 3.12.3 it is not told of `sys.path`, and without
    its preload every worker would take seconds to start.
    """
    fork_server()
    _ensure_tracker()  # first, because it unblocks signals when it starts
    before = dict(os.environ)
    wanted = child_environment() | {FORKER_VARIABLE: str(os.getpid())}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    os.environ.update(wanted)
    try:
        forkserver.ensure_running()
    finally:
        for name in wanted.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _ensure_tracker() -> None:
    """Start multiprocessing's cleaner unless it is alive, which else would end by warning of what it cleans up.

    Workers are killed, and leave what the compiler has started in them.
    """
    sys.warnoptions.append("ignore:resource_tracker")
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove("ignore:resource_tracker")


class Worker:
    """One run in its own process and process group."""

    def __init__(self, config: RunConfig, directory: Path, gpu_uuid: str | None) -> None:
        self.config = config
        self._tail = b""
        self._exit_code: int | None = None
        self.log_closed = False
        context = fork_server()
        self.log, log_of_child = context.Pipe(duplex=False)
        os.set_blocking(self.log.fileno(), False)
        self.process: BaseProcess = context.Process(
            target=_run_worker, args=(config, directory.absolute(), log_of_child, gpu_uuid), name=config.key
        )
        ensure_fork_server()
        self.process.start()
        self.started = monotonic()
        log_of_child.close()

    @property
    def elapsed_s(self) -> float:
        """Since the start, by a clock that is never set back."""
        return monotonic() - self.started

    def drain(self) -> None:
        """Take what the worker has printed, keeping the end, and note when every writer has closed."""
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

    def kill(self) -> None:
        """End the worker, its whole process group and all that descends from it at once."""
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
        """Wait for the end, kill what the worker left behind, and return its exit code, negative for a signal."""
        if self._exit_code is not None:
            return self._exit_code
        self.process.join()
        code = self.process.exitcode
        self.kill()
        kill_orphans()
        self.drain()
        self.log.close()
        self._exit_code = 255 if code is None else code
        self.process.close()
        return self._exit_code


def _run_worker(config: RunConfig, directory: Path, log: Connection, gpu_uuid: str | None) -> None:
    # Imported here, in the child, because the parent must not import torch.
    from cs336_systems import worker

    worker.main(config, directory, log, gpu_uuid)


def kill_orphans() -> None:
    """Kill and reap processes that dead workers left and that became children of this one (a child subreaper).

    The fork server and the resource tracker, which multiprocessing starts, share this process's session; a
    worker's descendants do not, because a worker leads a session of its own.
    """
    for _ in range(_GENERATIONS):
        strangers = [child for child in psutil.Process().children() if _in_other_session(child)]
        for stranger in strangers:
            with contextlib.suppress(psutil.Error):
                stranger.kill()
                stranger.wait(timeout=10)
        if not strangers:
            return


def _in_other_session(process: psutil.Process) -> bool:
    try:
        return os.getsid(process.pid) != os.getsid(0)
    except ProcessLookupError:
        return False
