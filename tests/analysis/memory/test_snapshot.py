"""Oracle: Python's own unpickler on the same file, and a loop over its dicts."""

import copy
import gzip
import itertools
import os
import pickle
import random
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cs336.analysis.columns import ProfileError
from cs336.analysis.memory.snapshot import (
    UNRECORDED,
    Action,
    BlockState,
    Frame,
    Snapshot,
    read_snapshot,
)
from tests.analysis.memory.snapshots import (
    MIB,
    Allocator,
    frame,
    snapshot_of,
    some_stacks,
    use_at_random,
    write,
)

EVENT = {
    "action": "alloc",
    "addr": 4096,
    "size": 512,
    "stream": 0,
    "time_us": 7,
    "frames": [frame("f", 3)],
}
BLOCK = {
    "address": 4096,
    "size": 512,
    "requested_size": 500,
    "state": "active_allocated",
    "frames": [frame("g", 4)],
}
SEGMENT = {
    "device": 0,
    "address": 4096,
    "total_size": 2**21,
    "stream": 0,
    "is_expandable": False,
    "blocks": [BLOCK],
}
GOOD = {"segments": [SEGMENT], "device_traces": [[EVENT]]}


def used(seed: int, num_calls: int = 1200, **options: Any) -> Allocator:
    made = Allocator(**options)
    made.record()
    use_at_random(made, random.Random(seed), num_calls, [*some_stacks(seed=seed), None])
    return made


def frames_of(thing: Mapping[str, Any]) -> tuple[Frame, ...]:
    if thing.get("frames") is None:
        return UNRECORDED
    return tuple(Frame(f["filename"], f["line"], f["name"]) for f in thing["frames"])


def check(loaded: Snapshot, content: Any) -> None:
    """Compare every number and every stack of the events."""
    for memory in loaded.devices:
        events = [
            event
            for event in content["device_traces"][memory.device]
            if event["action"].upper() in Action.__members__
        ]
        columns = memory.events
        assert [Action(code).name.lower() for code in columns.action.tolist()] == [
            event["action"] for event in events
        ]
        assert columns.address.tolist() == [
            event.get("addr", event.get("device_free")) for event in events
        ]
        for name, key in (("num_bytes", "size"), ("stream", "stream"), ("time_us", "time_us")):
            assert getattr(columns, name).tolist() == [event[key] for event in events], name
        assert [loaded.stacks[number] for number in columns.stack.tolist()] == [
            frames_of(event) for event in events
        ]
    assert len(loaded.stacks) == len(set(loaded.stacks))


@pytest.mark.parametrize("protocol", [2, 5])
def test_events_are_those_in_the_file(tmp_path: Path, protocol: int) -> None:
    content = snapshot_of(used(seed=protocol, limit_bytes=300 * MIB))
    loaded = read_snapshot(write(tmp_path / "s", content, protocol))
    assert len(loaded.devices[0].events) > 1700
    assert Action.OOM in loaded.devices[0].events.action
    check(loaded, pickle.loads((tmp_path / "s").read_bytes()))
    assert loaded.notes == ()


def test_segments_and_blocks(tmp_path: Path) -> None:
    devices = [used(1), used(2, is_expandable=True), Allocator(), used(3, num_calls=50)]
    content = snapshot_of(*devices)
    loaded = read_snapshot(write(tmp_path / "s", content))
    assert [memory.device for memory in loaded.devices] == [0, 1, 3]
    check(loaded, content)
    for memory in loaded.devices:
        segments = [
            segment for segment in content["segments"] if segment["device"] == memory.device
        ]
        blocks = [block for segment in segments for block in segment["blocks"]]
        assert memory.segments.address.tolist() == [segment["address"] for segment in segments]
        assert memory.segments.num_bytes.tolist() == [segment["total_size"] for segment in segments]
        assert memory.blocks.num_bytes.tolist() == [block["size"] for block in blocks]
        assert memory.blocks.requested_bytes.tolist() == [
            block["requested_size"] for block in blocks
        ]
        assert [BlockState(code).name.lower() for code in memory.blocks.state] == [
            block["state"] for block in blocks
        ]
        assert [loaded.stacks[number] for number in memory.blocks.stack.tolist()] == [
            frames_of(block) for block in blocks
        ]
        ends = memory.segments.address + memory.segments.num_bytes
        assert (memory.blocks.address < ends[memory.blocks.segment]).all()
        np.testing.assert_array_equal(
            np.bincount(memory.blocks.segment, weights=memory.blocks.num_bytes),
            memory.segments.num_bytes,
        )


def test_snapshots_of_older_versions_are_read(tmp_path: Path) -> None:
    """Until 2.0 blocks had no address and a `history`, whose first entry is the last request;
    events had no time.
    """
    content: Any = snapshot_of(used(4), used(5))
    whole = read_snapshot(write(tmp_path / "new", content))
    for block in (block for segment in content["segments"] for block in segment["blocks"]):
        latest = {
            "addr": block.pop("address"),
            "real_size": block.pop("requested_size"),
            "frames": block.pop("frames"),
        }
        older = {"addr": 7, "real_size": 9, "frames": []}
        block |= {"history": [latest, older]} if block["state"] != "inactive" else {}
    for event in itertools.chain.from_iterable(content["device_traces"]):
        del event["time_us"]
    for old, new in zip(
        read_snapshot(write(tmp_path / "old", content)).devices, whole.devices, strict=True
    ):
        for name in ("segment", "address", "num_bytes", "state"):
            assert getattr(old.blocks, name).tolist() == getattr(new.blocks, name).tolist()
        is_used = new.blocks.state != BlockState.INACTIVE
        assert (
            old.blocks.requested_bytes[is_used].tolist()
            == new.blocks.requested_bytes[is_used].tolist()
        )
        assert old.events.address.tolist() == new.events.address.tolist()
    assert [
        frames for frames in whole.stacks if frames not in read_snapshot(tmp_path / "old").stacks
    ] == []


def refusal(path: Path) -> str:
    with pytest.raises(ProfileError) as caught:
        read_snapshot(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert len(message) < 500 + len(str(path))
    return message


WRONG = {
    "event": [
        *((key, None) for key in EVENT if key not in ("frames", "time_us")),
        ("addr", 2**63),
        ("size", -512),
        ("size", 512.5),
        ("frames", 5),
    ],
    "segment": [(key, None) for key in SEGMENT if key != "is_expandable"],
    "block": [("size", None), ("state", None), ("state", "odd"), ("size", "text")],
    "sizes": [("total_size", -1), ("total_size", float("nan"))],
}
"""Keys with another value, or None for a key that is missing."""


@pytest.mark.parametrize(
    ("where", "key", "value"), [(where, *case) for where in WRONG for case in WRONG[where]]
)
def test_wrong_content_is_one_clear_line(tmp_path: Path, where: str, key: str, value: Any) -> None:
    content: Any = copy.deepcopy(GOOD)
    segment = content["segments"][0]
    changed = {
        "event": content["device_traces"][0][0],
        "segment": segment,
        "sizes": segment,
        "block": segment["blocks"][0],
    }[where]
    del changed[key]
    if value is not None:
        changed[key] = value
    assert "its content is not that of a snapshot" in refusal(write(tmp_path / "s", content))


@pytest.mark.parametrize("text", ["\udc9b", "\0\n\x1b", "ü€𝄞"])
def test_names_may_be_odd(tmp_path: Path, text: str) -> None:
    event = {**EVENT, "frames": [{**frame("f"), "filename": text}]}
    loaded = read_snapshot(write(tmp_path / "s", {**GOOD, "device_traces": [[event]]}))
    assert loaded.stacks[loaded.devices[0].events.stack[0]] == (
        Frame(text.replace("\udc9b", "?"), 1, "f"),
    )


def test_what_is_no_snapshot(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "json").write_text("{}")
    (tmp_path / "gz").write_bytes(gzip.compress(pickle.dumps(GOOD), mtime=0))
    os.mkfifo(tmp_path / "fifo")
    assert "it is empty" in refusal(tmp_path / "empty")
    assert "it is something else" in refusal(tmp_path / "json")
    assert "gzip -dk" in refusal(tmp_path / "gz")
    assert "no regular file" in refusal(tmp_path / "fifo")
    assert "a directory" in refusal(tmp_path)
    assert "No such file" in refusal(tmp_path / "missing")
    with pytest.raises(ProfileError, match="no name of a file"):
        read_snapshot(tmp_path / "a\0b")
    assert "KeyError: 'segments'" in refusal(write(tmp_path / "dict", {"device_traces": []}))
    assert "_dump_snapshot" in refusal(write(tmp_path / "list", []))


MADE = "made-by-a-pickle"


class Evil:
    def __reduce__(self) -> Any:
        return os.system, (f"touch {MADE}",)


def put(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts)


CODE = "would run code of the file"
HOSTILE = {
    "reduce": (pickle.dumps(Evil(), 4), CODE),
    "global of a long name": (put(b"c" + b"x" * 10**6 + b"\nsystem\n."), CODE),
    "persistent id": (put(b"Pabc\n."), CODE),
    "extension": (put(b"\x82\x01."), "extension code 1"),
    "a terabyte of bytes": (put(b"\x8e" + (2**40).to_bytes(8, "little") + b"x."), "MiB of memory"),
    "deep": (put(b"]" * 1_000_000 + b"a" * 999_999 + b"."), "not that of a snapshot"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_content(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content, expected = HOSTILE[name]
    path = Path("snapshot.pickle")
    path.write_bytes(content)
    before = resource.getrlimit(resource.RLIMIT_AS)
    assert expected in refusal(path)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert list(tmp_path.iterdir()) == [tmp_path / path]


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    content = pickle.dumps(GOOD, 4)
    for length in range(2, len(content), 7):
        (tmp_path / "s").write_bytes(content[:length])
        assert "truncated" in refusal(tmp_path / "s")


@pytest.mark.speed
def test_a_million_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bounds are those that the project promises, in processor time and in memory."""
    content = snapshot_of(used(seed=0))
    (events,) = content["device_traces"]
    frames = [frame(f"function_{i}", i) for i in range(400)]
    stacks = [random.Random(i).sample(frames, 25) for i in range(300)]
    content["device_traces"] = [
        [
            {**events[i % len(events)], "frames": list(stacks[i % 300]), "time_us": i}
            for i in range(1_000_000)
        ]
    ]
    path = write(tmp_path / "s", content)
    del content
    words = [sys.executable, "-c", MEASURE, str(path)]
    read_s, load_s, num_bytes = map(
        float, subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    )
    ratio = num_bytes / path.stat().st_size
    with capsys.disabled():
        print(
            f"\nsnapshot, a million events: {read_s:.2f} s to read, {load_s:.2f} s to load, "
            f"memory {ratio:.2f} files"
        )
    assert read_s <= MAX_SLOWDOWN * load_s
    assert 1 < ratio <= MAX_MEMORY


MAX_SLOWDOWN, MAX_MEMORY = 3.5, 12
"""Largest ratio to the time that `pickle.load` takes, and of the memory to the size of the file."""
MEASURE = """
import gc, pickle, sys, time
from pathlib import Path
from cs336.analysis.memory.replay import replay_device
from cs336.analysis.memory.snapshot import read_snapshot


def peak_bytes():
    return next(
        1024 * int(line.split()[1])
        for line in open("/proc/self/status")
        if line.startswith("VmHWM")
    )


path, before = Path(sys.argv[1]), peak_bytes()
begun = time.process_time()
found = read_snapshot(path)
read_s = time.process_time() - begun
replay_device(found.devices[0], found.settings).allocated_bytes.max()
after = peak_bytes()
gc.disable()
begun = time.process_time()
pickle.loads(path.read_bytes())
print(read_s, time.process_time() - begun, after - before)
"""
