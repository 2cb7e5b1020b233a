"""Models that go wrong: each factory injects one fault into the worker that calls it.

A worker's current directory is that of its sweep, so a factory leaves notes for the test there.
"""

import contextlib
import ctypes
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.util import Finalize
from pathlib import Path

import psutil
import torch
from torch import nn

NEVER_S = 600
PAUSED, NOTES = Path("paused"), Path("notes")
HANGING = Path("hanging")
RUNS = Path("runs")


def good(vocab_size, d_model):
    if multiprocessing.parent_process() is not None:
        # several wait for each other for long where other processes are at work
        torch.set_num_threads(1)
    return nn.Sequential(nn.Embedding(vocab_size, d_model), nn.Linear(d_model, vocab_size))


class AtSecondStep(nn.Module):
    """A good model whose second step calls `fault` first; its first forward pass, before the
    steps, is a trial.
    """

    def __init__(self, fault, vocab_size, d_model):
        super().__init__()
        self.fault, self.model, self.passes = fault, good(vocab_size, d_model), 0

    def forward(self, tokens):
        self.passes += 1
        if self.passes == 3:
            self.fault()
        return self.model(tokens)


def say(text):
    print(text, file=sys.stderr, flush=True)


def sigkill(vocab_size, d_model):
    return AtSecondStep(lambda: os.kill(os.getpid(), signal.SIGKILL), vocab_size, d_model)


def nameless_signal():
    os.kill(os.getpid(), signal.SIGRTMIN + 5)
    time.sleep(NEVER_S)


def segfault():
    say("the last words before a segmentation fault")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


def kills_the_fork_server():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(NEVER_S)


def stops_the_fork_server_and_hangs():
    os.kill(os.getppid(), signal.SIGSTOP)
    HANGING.touch()
    time.sleep(NEVER_S)


def exits_well():
    os._exit(0)


def raises():
    raise RuntimeError("no such layer \0")


def asks_for_a_pebibyte():
    return torch.empty(2**50, dtype=torch.uint8)


def hangs_printing():
    print("still alive", flush=True)
    HANGING.touch()
    while True:
        print("still alive", flush=True)


def hangs_with_closed_output():
    os.close(1)
    os.close(2)
    HANGING.touch()
    time.sleep(NEVER_S)


def stops_itself():
    HANGING.touch()
    os.kill(os.getpid(), signal.SIGSTOP)


def start_family():
    """Descendants that hold the worker's output: in its group, in their own, and daemons with
    children of their own.
    """
    for apart in (False, True):
        subprocess.Popen(["sleep", str(NEVER_S)], start_new_session=apart)
    daemon = f"""
import os, sys, time
for generation in range(4):
    if os.fork():
        os._exit(0) if generation == 0 else time.sleep({NEVER_S})
    os.setsid()
open("{NOTES}", "w").close()
time.sleep({NEVER_S})
"""
    subprocess.run([sys.executable, "-c", daemon], check=True)
    while not NOTES.exists():
        time.sleep(0.01)
    NOTES.unlink()


def good_with_family(vocab_size, d_model):
    start_family()
    return good(vocab_size, d_model)


def exits_with_family():
    start_family()
    os._exit(0)


def hangs_with_family():
    start_family()
    HANGING.touch()
    time.sleep(NEVER_S)


def own_record():
    return RUNS / f"{multiprocessing.current_process().name}.json"


def finished_record():
    return min(path for path in RUNS.glob("*.json"))


def half_a_record():
    data = finished_record().read_bytes()
    own_record().write_bytes(data[: len(data) // 2])
    os._exit(0)


def record_of_the_future():
    own_record().write_text('{"format_version": 999}')
    os._exit(0)


def record_that_is_a_directory():
    own_record().mkdir()
    os._exit(0)


def fails_at_teardown(vocab_size, d_model):
    Finalize(None, os._exit, (3,), exitpriority=0)
    return good(vocab_size, d_model)


def hangs_at_teardown(vocab_size, d_model):
    threading.Thread(target=time.sleep, args=(NEVER_S,)).start()
    return good(vocab_size, d_model)


def hangs_while_it_judges(vocab_size, d_model):
    from cs336.analysis import warnings

    warnings._unstable = lambda *_: time.sleep(NEVER_S)
    return good(vocab_size, d_model)


def cannot_write_files(vocab_size, d_model):
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    return good(vocab_size, d_model)


def fails_once(vocab_size, d_model):
    if not NOTES.exists():
        NOTES.touch()
        os._exit(3)
    return good(vocab_size, d_model)


def pauses_once(vocab_size, d_model, context_length):
    """Where the context is 8, wait to be interrupted; only the first time."""
    if context_length == 8 and not PAUSED.exists():
        PAUSED.touch()
        time.sleep(NEVER_S)
    return good(vocab_size, d_model)


def pauses_with_family(vocab_size, d_model, context_length):
    if context_length == 8 and not PAUSED.exists():
        start_family()
    return pauses_once(vocab_size, d_model, context_length)


def fails_where_context_is_8(vocab_size, d_model, context_length):
    if context_length == 8:
        segfault()
    return good(vocab_size, d_model)


def fails_by_context(vocab_size, d_model, context_length):
    """Where the context is 20, wait; where it is 24, kill the process of Ray's task, which
    started the fork server.
    """
    faults = {
        8: segfault,
        12: asks_for_a_pebibyte,
        16: lambda: os.kill(os.getpid(), signal.SIGKILL),
    }
    if context_length == 20:
        PAUSED.touch()
        time.sleep(NEVER_S)
    if context_length == 24:
        with NOTES.open("a") as notes:
            notes.write("x")
        psutil.Process(os.getppid()).parent().kill()
        time.sleep(NEVER_S)
    return AtSecondStep(faults.get(context_length, time.time), vocab_size, d_model)


def takes_a_while(vocab_size, d_model):
    time.sleep(0.3)
    return good(vocab_size, d_model)


def fills_the_disk(vocab_size, d_model, context_length):
    """Where the context is 8, keep a copy of the finished record, then fill the file system of
    the records.
    """
    if context_length == 8:
        runs = next(Path("data").glob("*/*/runs"))
        shutil.copytree(runs, "before")
        with (
            contextlib.suppress(OSError),
            (runs.parent / "ballast").open("wb", buffering=0) as ballast,
        ):
            while ballast.write(b"x" * 4096):
                pass
    return good(vocab_size, d_model)


def notes_its_process(vocab_size, d_model):
    process = psutil.Process()
    note = (
        process.pid,
        os.getsid(0),
        process.ppid(),
        int(torch.cuda.is_initialized()),
        threading.active_count(),
    )
    with NOTES.open("a") as notes:
        notes.write(" ".join(map(str, note)) + "\n")
    return good(vocab_size, d_model)


class OutOfRange(nn.Module):
    """Looks up a token that is not in the embedding: on a GPU, a device-side assert."""

    def __init__(self, vocab_size, d_model):
        super().__init__()
        self.model = good(vocab_size, d_model)

    def forward(self, tokens):
        return self.model(tokens + 10**6)


def out_of_range(vocab_size, d_model):
    return OutOfRange(vocab_size, d_model)


def asks_for_more_than_the_gpu_has(vocab_size, d_model):
    return AtSecondStep(
        lambda: torch.empty(2**41, dtype=torch.uint8, device="cuda"), vocab_size, d_model
    )
