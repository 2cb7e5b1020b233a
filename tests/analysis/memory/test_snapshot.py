"""Oracle: Python's own unpickler on the same file, and a loop over its dicts."""

import gzip
import os
import pickle
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cs336_systems.analysis.columns import ProfileError
from cs336_systems.analysis.memory.lifetimes import Action, BlockState, Frame
from cs336_systems.analysis.memory.snapshot import CHUNK, MAX_ALIKE, MAX_NOTES, Snapshot, read_snapshot
from tests.analysis.memory.snapshots import (
    Allocator,
    frame,
    repeated,
    snapshot_of,
    some_stacks,
    train,
    use_at_random,
    write,
)

EVENT = {"action": "alloc", "addr": 4096, "size": 512, "stream": 0, "time_us": 7, "frames": [frame("f", 3)]}
BLOCK = {"address": 4096, "size": 512, "requested_size": 500, "state": "active_allocated", "frames": [frame("g", 4)]}
SEGMENT = {"device": 0, "address": 4096, "total_size": 2**21, "stream": 0, "is_expandable": False, "blocks": [BLOCK]}
ANNOTATION = {"name": "step", "stage": "START", "device": 0, "time_us": 5}
GOOD = {"segments": [SEGMENT], "device_traces": [[EVENT]], "external_annotations": [{**ANNOTATION, "more": "x"}]}


def used(seed: int, num_calls: int = 1200, **options: Any) -> Allocator:
    made = Allocator(**options)
    made.record()
    use_at_random(made, random.Random(seed), num_calls, [*some_stacks(seed=seed), None])
    return made


def frames_of(thing: Mapping[str, Any]) -> tuple[Frame, ...]:
    return tuple(Frame(f["filename"], f["line"], f["name"]) for f in thing.get("frames") or ())


def check(found: Snapshot, content: Any) -> None:
    """Compare every number and every stack of the events."""
    for memory in found.devices:
        events = [
            event for event in content["device_traces"][memory.device] if event["action"].upper() in Action.__members__
        ]
        columns = memory.events
        assert [Action(code).name.lower() for code in columns.action.tolist()] == [event["action"] for event in events]
        assert columns.address.tolist() == [event.get("addr", event.get("device_free")) for event in events]
        for name, key in (("num_bytes", "size"), ("stream", "stream"), ("time_us", "time_us")):
            assert getattr(columns, name).tolist() == [event[key] for event in events], name
        assert [found.stacks[number] for number in columns.stack.tolist()] == [frames_of(event) for event in events]
    assert len(found.stacks) == len(set(found.stacks))


def as_of(version: str, content: dict[str, Any]) -> dict[str, Any]:
    """The snapshot with the keys that a version of torch writes."""
    for event in content["device_traces"][0]:
        frames = event.pop("frames", None)
        if version == "2.6":
            del event["compile_context"], event["user_metadata"]
        if version == "2.12":
            event["forward_frames"] = [f"text {len(event) % 3}"] * 2
            event["pool_id"] = tuple([0, 0])  # noqa: C409  # a new one each time
        if frames is not None:
            event["frames"] = frames
    return content


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("version", ["2.6", "2.8", "2.12"])
def test_events_are_those_in_the_file(tmp_path: Path, version: str, protocol: int) -> None:
    content = as_of(version, snapshot_of(used(seed=protocol)))
    found = read_snapshot(write(tmp_path / "s", content, protocol))
    assert len(found.devices[0].events) > 1700
    check(found, pickle.loads((tmp_path / "s").read_bytes()))
    assert found.notes == ()


def large(num_events: int) -> dict[str, Any]:
    made = Allocator()
    train(made, 1)
    made.record()
    train(made, 1)
    assert made.events
    made.events = repeated(made.events, num_events)
    return snapshot_of(made)


def spoilt(events: list[dict[str, Any]], seed: int) -> None:
    """Change some events, each in a way of its own."""
    rng = random.Random(seed)
    for row in sorted(rng.sample(range(len(events)), 60)):
        event = events[row]
        match rng.randrange(6):
            case 0:
                event["later"] = rng.choice([None, True, 1.5, [1, [2]], {"a": {}}, "text", (1, 2)])
            case 1:
                event["frames"] = [frame(f"new_{row}")]
            case 2:
                events[row] = dict(reversed(event.items()))
            case 3:
                event["action"] = rng.choice(["borrowed", "lent"])
            case 4:
                events[row] = {**EVENT, "action": "oom", "device_free": 77}
                del events[row]["addr"]
            case 5:
                event["frames"] = events[row // 2].get("frames", [])


@pytest.mark.parametrize("seed", range(3))
def test_unusual_events_among_many(tmp_path: Path, seed: int) -> None:
    content = large(4 * CHUNK)
    spoilt(content["device_traces"][0], seed)
    check(read_snapshot(write(tmp_path / "s", content)), content)


def test_many_stacks_that_begin_alike(tmp_path: Path) -> None:
    """More stacks than are compared one by one, each of them twice."""
    first, last, middle = frame("first"), frame("last"), [frame("middle", line) for line in range(3 * MAX_ALIKE)]
    events = [{**EVENT, "frames": [first, each, last]} for each in [*middle, *reversed(middle)]]
    content = {**GOOD, "device_traces": [events]}
    found = read_snapshot(write(tmp_path / "s", content))
    check(found, content)
    assert len(set(found.devices[0].events.stack.tolist())) == len(middle)


def test_what_is_unknown_is_counted(tmp_path: Path) -> None:
    content = large(9_000)
    events = content["device_traces"][0]
    for event in events:
        event["later"] = 5
    for event in events[100:7000:1000]:
        event["action"] = "borrowed"
    found = read_snapshot(write(tmp_path / "s", content))
    assert len(found.devices[0].events) == len(events) - 7
    assert found.notes == (
        f"Passed over: {len(events)} times key 'later' of an event.",
        "Passed over: 7 times action 'borrowed'.",
    )


def test_of_many_unknown_actions_the_most_frequent_are_named_and_all_are_counted(tmp_path: Path) -> None:
    """Without a bound, 50,000 of them would make 1.9 MB of notes."""
    content = large(1_000)
    events = content["device_traces"][0]
    unknown = {"often": 30, "sometimes": 20, **{f"once {i}": 1 for i in range(50_000)}}
    events += [{**events[0], "action": action} for action, count in unknown.items() for _ in range(count)]
    notes = read_snapshot(write(tmp_path / "s", content)).notes
    assert len(notes) <= MAX_NOTES
    assert sum(int(note.split()[2]) for note in notes) == sum(unknown.values())
    assert notes[:2] == ("Passed over: 30 times action 'often'.", "Passed over: 20 times action 'sometimes'.")


def test_segments_and_blocks(tmp_path: Path) -> None:
    devices = [used(1), used(2, is_expandable=True), Allocator(), used(3, num_calls=50)]
    content = snapshot_of(*devices)
    found = read_snapshot(write(tmp_path / "s", content))
    assert [memory.device for memory in found.devices] == [0, 1, 3]
    check(found, content)
    for memory in found.devices:
        segments = [segment for segment in content["segments"] if segment["device"] == memory.device]
        blocks = [block for segment in segments for block in segment["blocks"]]
        assert memory.segments.address.tolist() == [segment["address"] for segment in segments]
        assert memory.segments.num_bytes.tolist() == [segment["total_size"] for segment in segments]
        assert memory.blocks.num_bytes.tolist() == [block["size"] for block in blocks]
        assert memory.blocks.requested_bytes.tolist() == [block["requested_size"] for block in blocks]
        assert [BlockState(code).name.lower() for code in memory.blocks.state] == [block["state"] for block in blocks]
        assert [found.stacks[number] for number in memory.blocks.stack.tolist()] == [
            frames_of(block) for block in blocks
        ]
        ends = memory.segments.address + memory.segments.num_bytes
        assert (memory.blocks.address < ends[memory.blocks.segment]).all()
        np.testing.assert_array_equal(
            np.bincount(memory.blocks.segment, weights=memory.blocks.num_bytes), memory.segments.num_bytes
        )


def test_settings(tmp_path: Path) -> None:
    content = {
        **GOOD,
        "allocator_settings": {"expandable_segments": True, "roundup_power2_divisions": {"512": 4}, "odd": [1]},
    }
    found = read_snapshot(write(tmp_path / "s", content))
    assert found.settings == {"expandable_segments": True, "roundup_power2_divisions.512": 4}


def test_nothing_recorded(tmp_path: Path) -> None:
    assert read_snapshot(write(tmp_path / "s", {"segments": [], "device_traces": [[], []]})).devices == ()
    found = read_snapshot(write(tmp_path / "s", {"segments": [SEGMENT], "device_traces": [[]]}))
    assert len(found.devices[0].events) == 0
    assert len(found.devices[0].blocks) == 1


def changed(path: str, value: Any) -> dict[str, Any]:
    """A snapshot with another value at a path like `segments.blocks.size`, or without the key."""
    kinds = {"device_traces": EVENT, "segments": SEGMENT, "blocks": BLOCK}
    *outer, key = path.split(".")
    inner = {
        name: thing
        for name, thing in (kinds[outer[-1]] if outer else GOOD).items()
        if name != key or value != "missing"
    }
    if value != "missing":
        inner[key] = value
    for name in reversed(outer):
        if name == "blocks":
            inner = {**SEGMENT, "blocks": [inner]}
        else:
            inner = {**GOOD, name: [[inner] if name == "device_traces" else inner]}
    return inner


WRONG = {
    "segments": ["missing", None, {}, [None], [[]]],
    "device_traces": ["missing", "x", [None, 5], [[7]], [[[]]], [["text"]]],
    "allocator_settings": [[]],
    "external_annotations": [
        {},
        [1],
        [{"name": "x"}],
        *([{**ANNOTATION, key: None}] for key in ANNOTATION),
        [{**ANNOTATION, "name": 1}],
        [{**ANNOTATION, "time_us": 2**63}],
    ],
    "device_traces.action": ["missing", 5, None, []],
    **{
        f"device_traces.{key}": ["missing", "12", 1.0, 2**63, -(2**63) - 1, 10**400, None, []]
        for key in ("addr", "size", "stream", "time_us")
    },
    "device_traces.frames": [
        5,
        "text",
        {},
        (),
        (frame("f"),),
        [5],
        [{}],
        [[]],
        *([{**frame("f"), key: None}] for key in ("filename", "line", "name")),
    ],
    "segments.blocks": ["missing", None, [None], {}],
    **{f"segments.{key}": ["missing", "x", 2**64] for key in ("device", "address", "total_size", "stream")},
    **{f"segments.blocks.{key}": ["missing", "x", 0.5] for key in ("address", "size", "requested_size", "state")},
    "segments.blocks.frames": [5],
}
SIZES = ["device_traces.addr", "device_traces.size", "segments.address", "segments.total_size", "segments.blocks.size"]
CASES = [(path, value) for path, values in WRONG.items() for value in values] + [
    (path, value) for path in SIZES for value in (-1, 2**63 - 1)
]


def test_what_the_wrong_contents_are_made_of_is_right(tmp_path: Path) -> None:
    check(read_snapshot(write(tmp_path / "s", GOOD)), GOOD)


@pytest.mark.parametrize(("path", "value"), CASES)
def test_wrong_content_is_one_clear_line(tmp_path: Path, path: str, value: Any) -> None:
    with pytest.raises(ProfileError) as caught:
        read_snapshot(write(tmp_path / "s", changed(path, value)))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 's'}: ")
    assert "\n" not in message
    assert len(message) < 400 + len(str(tmp_path))
    assert path.split(".")[-1] in message or type(value) is list or value in (-1, 2**63 - 1)
    assert "needs" in message


@pytest.mark.parametrize("row", [0, 8_999])
@pytest.mark.parametrize(
    ("key", "value"), [("size", "12"), ("addr", 2**63), ("size", -1), ("action", None), ("frames", 5)]
)
def test_wrong_content_among_many(tmp_path: Path, row: int, key: str, value: Any) -> None:
    content = large(9_000)
    content["device_traces"][0][row][key] = value
    with pytest.raises(ProfileError, match="needs"):
        read_snapshot(write(tmp_path / "s", content))


@pytest.mark.parametrize("text", ["\udc9b", "\0\n\x1b", "ü€𝄞"])
def test_texts_may_be_odd(tmp_path: Path, text: str) -> None:
    event = {**EVENT, "frames": [{**frame("f"), "filename": text}]}
    content = {**GOOD, "device_traces": [[event]], "allocator_settings": {text: text, "huge": 10**30}}
    found = read_snapshot(write(tmp_path / "s", content))
    readable = text.replace("\udc9b", "\ufffd" * 3)
    memory = found.devices[0]
    assert found.stacks[memory.events.stack[0]] == (Frame(readable, 1, "f"),)
    assert found.settings == {readable: readable, "huge": 10**30}


def test_what_is_no_snapshot(tmp_path: Path) -> None:
    def problem(path: Path) -> str:
        with pytest.raises(ProfileError) as caught:
            read_snapshot(path)
        return str(caught.value)

    (tmp_path / "empty").touch()
    (tmp_path / "json").write_text("{}")
    (tmp_path / "gz").write_bytes(gzip.compress(pickle.dumps(GOOD), mtime=0))
    os.mkfifo(tmp_path / "fifo")
    assert "it is empty" in problem(tmp_path / "empty")
    assert "it is something else" in problem(tmp_path / "json")
    assert "gzip -dk" in problem(tmp_path / "gz")
    assert "no regular file" in problem(tmp_path / "fifo")
    assert "a directory" in problem(tmp_path)
    assert "No such file" in problem(tmp_path / "missing")
    assert "'segments' needs a list, got nothing" in problem(write(tmp_path / "dict", {"device_traces": []}))
    assert "the top level needs a dict, got a list" in problem(write(tmp_path / "list", []))
    assert "_dump_snapshot" in problem(write(tmp_path / "list", []))
