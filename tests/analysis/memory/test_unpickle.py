"""Oracle: Python's own pickle, for what is plain data. Everything else must end in one clear line, soon and small."""

import os
import pickle
import pickletools
import random
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.analysis.columns import ProfileError
from cs336_systems.analysis.memory.snapshot import read_snapshot
from cs336_systems.analysis.memory.unpickle import PADDING, Machine
from tests.analysis.memory.snapshots import write

FILE = Path("snapshot.pickle")


def load(content: bytes) -> Any:
    return Machine(FILE, bytearray(content) + bytes(PADDING)).load()


def problem(content: bytes) -> str:
    with pytest.raises(ProfileError) as caught:
        load(content)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def plain(rng: random.Random, depth: int = 0) -> Any:
    """Data of all kinds that a snapshot may hold, with parts that occur twice."""
    if depth < 4 and rng.random() < 0.6:
        items = [plain(rng, depth + 1) for _ in range(rng.randrange(0, 6))]
        items += items[:1] + ["shared"] * (depth == 1)
        texts = [str(rng.randrange(40)) for _ in items]
        return rng.choice([items, tuple(items), dict(zip(texts, items, strict=True))])
    return rng.choice([
        None, True, False, 0, 1, 255, 256, 65535, 65536, -1, 2**31 - 1, -(2**31), 2**31, 2**62, -(2**63), 2**64, 10**30,
        0.0, -1.5, 1e300, "", "a", "ü€𝄞", "x" * 255, "y" * 256, "z" * 70_000,
    ])  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("seed", range(25))
def test_plain_data_is_what_pickle_makes_of_it(seed: int, protocol: int) -> None:
    content = pickle.dumps([plain(random.Random(f"{seed} {i}")) for i in range(5)], protocol)
    found = load(content)
    assert found == pickle.loads(content)
    assert repr(found) == repr(pickle.loads(content))  # 1 is not True
    assert load(pickletools.optimize(content)) == found


def test_what_is_shared_is_shared() -> None:
    inner = ["x"]
    first, second = load(pickle.dumps([inner, inner]))
    assert first is second


def test_lists_and_dicts_of_many_batches() -> None:
    content = {"list": list(range(5500)), "dict": {str(i): i for i in range(5500)}, "lists": [[i] for i in range(3000)]}
    assert load(pickle.dumps(content)) == content


MADE = Path("made-by-a-pickle")


class Evil:
    def __reduce__(self) -> Any:
        return os.system, (f"touch {MADE}",)


def put(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts)


HOSTILE = {
    "reduce": (pickle.dumps(Evil(), 4), "opcode STACK_GLOBAL would run code"),
    "global": (put(b"cos\nsystem\n."), "opcode GLOBAL would run code"),
    "reduce of protocol 2": (pickle.dumps(Evil(), 2), "opcode GLOBAL would run code"),
    "instance": (put(b"(ios\nsystem\n."), "opcode INST would run code"),
    "object": (put(b"(No."), "opcode OBJ would run code"),
    "build": (put(b"}}b."), "opcode BUILD would run code"),
    "extension": (put(b"\x82\x01."), "opcode EXT1 would run code"),
    "persistent id": (put(b"Pabc\n."), "opcode PERSID would run code"),
    "binary persistent id": (put(b"NQ."), "opcode BINPERSID would run code"),
    "bytes": (put(b"C\x01x."), "opcode SHORT_BINBYTES is for data that no snapshot holds"),
    "a terabyte of bytes": (put(b"\x8e" + (2**40).to_bytes(8, "little") + b"x."), "opcode BINBYTES8"),
    "a terabyte of text": (put(b"\x8d" + (2**40).to_bytes(8, "little") + b"x."), "truncated"),
    "four gigabytes of text": (put(b"X\xff\xff\xff\xffx."), "truncated"),
    "a set": (put(b"\x8f."), "opcode EMPTY_SET"),
    "memo bomb": (bytes.fromhex("80044e72ffffff072e"), "needed memo index 0, got 134217727"),
    "memo bomb in text": (put(b"Np99999999999\n."), "opcode PUT"),
    "nothing in the memo": (put(b"h\x05."), "memo index 5 of 0"),
    "tuple as key": (put(b"}(N" + b"\x85" * 900 + b"K\x01u."), "needed strings as keys"),
    "endless tuples as key": (put(b"}(N" + b"2\x86" * 60 + b"K\x01u."), "opcode DUP"),
    "containers": (put(b"]" * 100_000 + b"."), "more than 13500 lists, dicts and tuples in 100003 bytes"),
    "deep": (put(b"(" * 100_000), "nested more than 1000 deep"),
    "stack": (put(b"N" * 2_000_000), "more than 1048576 objects wait"),
    "references": (put(b"N\x94" + b"h\x00" * 2_000_000), "more than 1048576 objects wait"),
    "huge number": (put(b"\x8b\0\0\x10\0" + b"\xff" * 2**20 + b"."), "a whole number of 1048576 bytes"),
    "protocol": (b"\x80\x06N.", "needed protocol 5 or lower, got 6"),
    "unknown opcode": (put(b"\xff."), "opcode 0xff is unknown"),
    "nothing on the stack": (put(b"."), "needed one object at the end, got 0"),
    "open mark": (put(b"(N."), "1 open marks"),
    "empty stack": (put(b"a."), "needed an object that is not there"),
    "no mark": (put(b"]e."), "needed a mark that is not there"),
    "append to text": (put(b"\x8c\x01aNa."), "needed a list, got a str"),
    "items of a list": (put(b"](NNu."), "needed a dict, got a list"),
    "odd items": (put(b"}(\x8c\x01au."), "needed strings as keys, each with a value"),
    "empty": (b"", "it is empty"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_content(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, expected = HOSTILE[name]
    monkeypatch.chdir(tmp_path)
    FILE.write_bytes(content)
    tracemalloc.start()
    begun = time.process_time()
    with pytest.raises(ProfileError) as caught:
        read_snapshot(FILE)
    took_s, (_, peak) = time.process_time() - begun, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    message = str(caught.value)
    assert message.startswith("snapshot.pickle: ")
    assert "\n" not in message
    assert len(message) < 400
    assert expected in message
    assert peak < 2**21 + 24 * len(content)
    assert took_s < 20
    assert not MADE.exists()


def test_the_attack_works_where_it_is_not_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(HOSTILE["reduce"][0])
    assert MADE.exists()


def endless() -> tuple[Any, ...]:
    """A tuple of 2**60 parts in 60 objects: whoever walks or hashes it, never ends."""
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
    event = {"action": "alloc", "addr": 0, "size": 1, "stream": 0, "time_us": 0}
    good = {"segments": [], "device_traces": [[event]]}
    assert len(read_snapshot(write(tmp_path / FILE, {**good, "later": made()})).devices) == 1
    odd = {**good, "device_traces": [[{**event, "later": made()}]]}
    assert read_snapshot(write(tmp_path / FILE, odd)).notes == ("Passed over: 1 times key 'later' of an event.",)
    wrong = [
        {**good, "device_traces": made()},
        {**good, "device_traces": [made()]},
        {**good, "segments": [made()]},
        {**good, "external_annotations": made()},
        *({**good, "device_traces": [[{**event, key: made()}]]} for key in ("action", "addr", "size", "time_us")),
    ]
    for content in wrong:
        with pytest.raises(ProfileError, match="needs"):
            read_snapshot(write(tmp_path / FILE, content))


@pytest.mark.parametrize("protocol", [2, 4])
def test_every_truncation_is_noticed(protocol: int) -> None:
    content = pickle.dumps({"a": [1, 2**40, "text", {"b": (1, 2.5)}], "c": ["x"] * 3}, protocol)
    assert load(content)
    for length in range(2, len(content)):
        assert "truncated" in problem(content[:length])


@pytest.mark.parametrize("nest", [b"]" * 1_000_000 + b"a" * 999_999, b"N" + b"\x85" * 1_000_000])
def test_a_million_levels_do_not_crash_the_interpreter(nest: bytes, tmp_path: Path) -> None:
    text = b"x" * 9_000_000  # so that the file is large enough for so many containers
    content = b"}(\x8c\x01aX" + len(text).to_bytes(4, "little") + text + b"\x8c\x08segments" + nest + b"u."
    path = tmp_path / FILE
    path.write_bytes(put(content))
    code = (
        "import sys\nfrom cs336_systems.analysis.memory.snapshot import *\n"
        "try: read_snapshot(Path(sys.argv[1]))\nexcept ProfileError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert "'device_traces' needs a list, got nothing" in done.stdout
