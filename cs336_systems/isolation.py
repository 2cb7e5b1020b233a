"""A worker process as the sweep sees it: started from a preloaded fork server, watched, killed with all it started."""

import contextlib
import functools
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic

import psutil

from cs336_systems.config import RunConfig

LOG_TAIL_BYTES = 16 * 1024
"""How much of the end of a worker's output is kept."""
_CHUNK_BYTES = 1 << 16
_CHUNKS_AT_ONCE = 64
"""Bound on one reading, so that a worker that prints without end cannot keep the sweep from its clock."""


@functools.cache
def fork_server() -> ForkServerContext:
    """The context whose server imports torch once and never touches CUDA, so that a fork of it is a fresh process."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cs336_systems.preload"])
    return context


class Worker:
    """One run in its own process and process group."""

    def __init__(self, config: RunConfig, directory: Path, gpu_uuid: str | None) -> None:
        self.config = config
        self.started = monotonic()
        self._tail = b""
        self.log_closed = False
        context = fork_server()
        self.log, log_of_child = context.Pipe(duplex=False)
        os.set_blocking(self.log.fileno(), False)
        self.process: BaseProcess = context.Process(
            target=_run_worker, args=(config, directory, log_of_child, gpu_uuid), name=config.key
        )
        self.process.start()
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
        """End the worker and its whole process group at once."""
        pid = self.process.pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                if self.process.is_alive():
                    os.kill(pid, signal.SIGKILL)

    def reap(self) -> int:
        """Wait for the end, kill what the worker left behind, and return its exit code, negative for a signal."""
        self.process.join()
        code = self.process.exitcode
        self.kill()
        kill_orphans()
        self.drain()
        self.log.close()
        self.process.close()
        return 255 if code is None else code


def _run_worker(config: RunConfig, directory: Path, log: Connection, gpu_uuid: str | None) -> None:
    # Imported here, in the child, because the parent must not import torch.
    from cs336_systems import worker

    worker.main(config, directory, log, gpu_uuid)


def kill_orphans() -> None:
    """Kill and reap processes that dead workers left and that became children of this one (a child subreaper).

    The fork server and the resource tracker, which multiprocessing starts, share this process's session; a
    worker's descendants do not, because a worker leads a session of its own.
    """
    own_session = os.getsid(0)
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(child.pid) != own_session:
                child.kill()
                child.wait(timeout=10)
