"""Ranks for tests: processes that are started once for a file of tests and run many checks, each
on all ranks.
"""

import importlib
import os
import signal
import socket
import tempfile
import traceback
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch

from cs336.config import Device
from cs336.parallel.collectives import Rank, devices_of, group_of
from cs336.sweep.isolation import fork_server, start
from cs336.sweep.process import die_with_parent
from tests.rounding import enter_other_processor

PATIENCE_S = 200
"""Far longer than any check takes."""


class Ranks:
    """`call("module:function", ...)` runs the function on every rank, and returns what each of
    them returned.
    """

    def __init__(self, processes):
        """`processes` are those of the ranks, by the pipe to each."""
        self._processes, self._pipes = processes, list(processes)

    def call(self, name, *arguments, **options):
        ended = [
            process.exitcode for process in self._processes.values() if process.exitcode is not None
        ]
        assert not ended, f"ranks have ended with exit codes {ended} before {name}{arguments}"
        for pipe in self._pipes:
            pipe.send((name, arguments, options))
        answers = {}
        while len(answers) < len(self._pipes):
            ready = wait([pipe for pipe in self._pipes if pipe not in answers], PATIENCE_S)
            assert ready, (
                f"no answer of {len(self._pipes) - len(answers)} ranks to {name}{arguments}"
            )
            for pipe in ready:
                try:
                    answers[pipe] = pipe.recv()
                except EOFError:
                    process = self._processes[pipe]
                    process.join()
                    pytest.fail(
                        f"a rank ended with exit code {process.exitcode} in {name}{arguments}"
                    )
        failed = [said for is_good, said in answers.values() if not is_good]
        assert not failed, "\n".join(failed)
        return [answers[pipe][1] for pipe in self._pipes]


@pytest.fixture(scope="session", autouse=True)
def loopback():
    """Ranks talk over it, also those of one machine; without a network there may be none."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        try:
            socket.create_connection(server.getsockname(), timeout=10).close()
        except OSError as error:
            pytest.skip(f"ranks cannot connect to each other on this machine: {error}")


@pytest.fixture(scope="module")
def two():
    with ranks_of(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three():
    with ranks_of(3) as ranks:
        yield ranks


@contextmanager
def ranks_of(count, gpu_uuids=()):
    """As many ranks, over gloo, or over NCCL on these GPUs.

    They meet in a file, because a port could be taken by another process in between.
    """
    context, processes = fork_server(), {}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            for rank in range(count):
                place = Rank(
                    rank=rank,
                    ranks=count,
                    meeting=f"file://{scratch}/meeting",
                    timeout_s=PATIENCE_S,
                )
                pipe, other = context.Pipe()
                gpu = devices_of(gpu_uuids, all_of_them=True)[rank] if gpu_uuids else None
                process = context.Process(target=_serve, args=(place, gpu, other), daemon=True)
                start(process)
                other.close()
                processes[pipe] = process
            yield Ranks(processes)
        finally:
            for pipe, process in processes.items():
                pipe.close()
                process.kill()
                process.join()


def _serve(place, gpu, pipe):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    torch.set_num_threads(1)
    enter_other_processor()
    os.chdir(Path(__file__).parents[2])
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    with group_of(place, Device.CPU if gpu is None else Device.CUDA):
        while True:
            try:
                name, arguments, options = pipe.recv()
            except EOFError:
                os._exit(0)
            module, _, function = name.partition(":")
            try:
                pipe.send(
                    (
                        True,
                        getattr(importlib.import_module(module), function)(*arguments, **options),
                    )
                )
            except BaseException:
                pipe.send((False, traceback.format_exc()))
