"""Hostile pickles: each is refused in one clear line, with bounded time and memory, and nothing of it runs."""

import contextlib
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cs336_systems.analysis.columns import ProfileError
from cs336_systems.analysis.memory import snapshot
from cs336_systems.analysis.memory.snapshot import read_snapshot
from tests.analysis.memory.snapshots import write

EVENT = {"action": "alloc", "addr": 0, "size": 1, "stream": 0, "time_us": 0}
GOOD = {"segments": [], "device_traces": [[EVENT]]}
MADE = "made-by-a-pickle"
READ = """
import sys
from cs336_systems.analysis.memory.snapshot import *
read_snapshot(Path(sys.argv[1]))
"""


class Evil:
    def __reduce__(self) -> Any:
        return os.system, (f"touch {MADE}",)


def put(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts)


CODE = "would run code of the file"
HOSTILE = {
    "reduce": (pickle.dumps(Evil(), 4), CODE),
    "reduce of protocol 2": (pickle.dumps(Evil(), 2), CODE),
    "global": (put(b"cos\nsystem\n."), CODE),
    "global of a long name": (put(b"c" + b"x" * 10**6 + b"\nsystem\n."), CODE),
    "instance": (put(b"(ios\nsystem\n."), CODE),
    "persistent id": (put(b"Pabc\n."), CODE),
    "binary persistent id": (put(b"NQ."), CODE),
    "object": (put(b"(No."), "cannot be read"),
    "build": (put(b"}}b."), "cannot be read"),
    "extension": (put(b"\x82\x01."), "extension code 1"),
    "extension of four bytes": (put(b"\x84\x01\x00\x00\x00."), "extension code 1"),
    "a terabyte of bytes": (put(b"\x8e" + (2**40).to_bytes(8, "little") + b"x."), "MiB of memory|truncated"),
    "a terabyte of text": (put(b"\x8d" + (2**40).to_bytes(8, "little") + b"x."), "MiB of memory|truncated"),
    "memo bomb": (bytes.fromhex("80044e72ffffff072e"), "MiB of memory"),
    "memo bomb in text": (put(b"Np99999999999\n."), "MiB of memory"),
    "nothing in the memo": (put(b"h\x05."), "cannot be read"),
    "tuples in a key, too many to hash": (put(b"}N" + b"2\x86" * 60 + b"K\x01s."), "more than 1 s"),
    "tuples in a key, too deep to hash": (put(b"}N" + b"\x85" * 10**6 + b"K\x01s."), "SIGSEGV|cannot be read|needs a"),
    "containers": (put(b"]" * 3_000_000 + b"."), "MiB of memory"),
    "deep": (put(b"]" * 1_000_000 + b"a" * 999_999 + b"."), "needs a dict, got a list"),
    "marks": (put(b"(" * 1_000_000), "truncated"),
    "protocol": (b"\x80\x06N.", "unsupported pickle protocol: 6"),
    "unknown opcode": (put(b"\xff."), "cannot be read"),
    "nothing on the stack": (put(b"."), "cannot be read"),
    "bytes": (put(b"C\x01x."), "needs a dict, got a bytes"),
    "a set": (put(b"\x8f."), "needs a dict, got a set"),
    "empty": (b"", "it is empty"),
}  # fmt: skip


def refusal(path: Path) -> str:
    with pytest.raises(ProfileError) as caught:
        read_snapshot(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert len(message) < 500 + len(str(path))
    return message


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_content(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(snapshot, "BASE_CPU_S", 1)
    monkeypatch.setattr(snapshot, "BASE_MEMORY_BYTES", 2**27)
    content, expected = HOSTILE[name]
    path = Path("snapshot.pickle")
    path.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert re.search(expected, refusal(path))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10
    assert list(tmp_path.iterdir()) == [tmp_path / path]


def test_the_attack_works_where_it_is_not_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(HOSTILE["reduce"][0])
    assert Path(MADE).exists()


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    content = pickle.dumps(GOOD, 4)
    for length in range(2, len(content), 7):
        (tmp_path / "s").write_bytes(content[:length])
        assert "truncated" in refusal(tmp_path / "s")


def endless() -> tuple[Any, ...]:
    """A tuple of 2**60 parts in 60 objects: walking or hashing it never ends."""
    found: tuple[Any, ...] = ()
    for _ in range(60):
        found = (found, found)
    return found


def itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize("made", [endless, itself])
def test_what_has_no_end_is_read_and_never_walked(made: Callable[[], Any], tmp_path: Path) -> None:
    assert len(read_snapshot(write(tmp_path / "s", {**GOOD, "later": made()})).devices) == 1
    odd = {**GOOD, "device_traces": [[{**EVENT, "later": made()}]]}
    assert read_snapshot(write(tmp_path / "s", odd)).notes == ("Passed over: 1 times key 'later' of an event.",)
    wrong = [
        {**GOOD, "device_traces": made()},
        {**GOOD, "device_traces": [made()]},
        {**GOOD, "segments": [made()]},
        {**GOOD, "external_annotations": made()},
        *({**GOOD, "device_traces": [[{**EVENT, key: made()}]]} for key in ("action", "addr", "size", "time_us")),
        {**GOOD, "device_traces": [[{**EVENT, "frames": [made()]}]]},
    ]
    for content in wrong:
        assert "needs" in refusal(write(tmp_path / "s", content))


def test_no_module_of_another_directory_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "s", GOOD)
    for name in ("pickle", "struct", "json", "resource", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(f"open('{MADE}', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert len(read_snapshot(path).devices) == 1
    assert not Path(MADE).exists()


def test_standard_streams_may_be_closed(tmp_path: Path) -> None:
    path = write(tmp_path / "s", GOOD)
    subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", READ, str(path)], check=True)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], psutil.Process]]:
    """A process that reads a file which takes as long as it may, and the child that does the work."""
    path = tmp_path / "s"
    path.write_bytes(HOSTILE["tuples in a key, too many to hash"][0])

    def hear_ctrl_c() -> None:
        """Also where the tests were started with SIGINT ignored, which a process inherits."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    words = [sys.executable, "-c", READ, str(path)]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL, preexec_fn=hear_ctrl_c) as process:
        try:
            deadline = time.monotonic() + 60
            while not (children := psutil.Process(process.pid).children()) or children[0].cpu_times().user < 0.3:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield process, children[0]
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends the child with its parent on Linux alone")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_child_ends_with_its_parent(
    reader: tuple[subprocess.Popen[bytes], psutil.Process], number: signal.Signals
) -> None:
    process, child = reader
    process.send_signal(number)
    process.wait(30)
    psutil.wait_procs([child], timeout=5)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
