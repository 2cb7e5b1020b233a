"""Hostile pickles: each is refused in one clear line, with bounded memory, and nothing of it runs."""

import os
import pickle
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.analysis.columns import ProfileError
from cs336_systems.analysis.memory.snapshot import read_snapshot
from tests.analysis.memory.snapshots import frame, write

EVENT = {"action": "alloc", "addr": 0, "size": 1, "stream": 0, "time_us": 0}
GOOD = {"segments": [], "device_traces": [[EVENT]]}
MADE = "made-by-a-pickle"


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
    "a terabyte of bytes": (put(b"\x8e" + (2**40).to_bytes(8, "little") + b"x."), "MiB of memory"),
    "a terabyte of text": (put(b"\x8d" + (2**40).to_bytes(8, "little") + b"x."), "MiB of memory|truncated"),
    "memo bomb": (bytes.fromhex("80044e72ffffff072e"), "MiB of memory"),
    "memo bomb in text": (put(b"Np99999999999\n."), "MiB of memory"),
    "nothing in the memo": (put(b"h\x05."), "cannot be read"),
    "shared references": (put(b"N" + b"2\x86" * 60 + b"."), "needs a dict, got a tuple"),
    "containers": (put(b"]" * 3_000_000 + b"."), "needs a dict, got a list"),
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
    content, expected = HOSTILE[name]
    path = Path("snapshot.pickle")
    path.write_bytes(content)
    before = resource.getrlimit(resource.RLIMIT_AS)
    assert re.search(expected, refusal(path))
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert list(tmp_path.iterdir()) == [tmp_path / path]


@pytest.mark.parametrize("name", ["reduce", "memo bomb", "a terabyte of bytes", "deep", "shared references"])
def test_the_command_ends_with_one_line_and_status_2(name: str, tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(HOSTILE[name][0])
    words = [sys.executable, "-m", "cs336_systems", "memory", str(tmp_path / "s")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert re.fullmatch(f"error: .*{HOSTILE[name][1]}.*\n", done.stderr)


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
    alike = [{**EVENT, "frames": [frame("f"), {**frame("g"), "later": made()}]} for _ in range(3)]
    alike[1]["frames"][0] = alike[2]["frames"][0] = alike[0]["frames"][0]
    assert len(read_snapshot(write(tmp_path / "s", {**GOOD, "device_traces": [alike]})).stacks) == 2
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
