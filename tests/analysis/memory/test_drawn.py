"""What is said of drawn snapshots. Oracles: the allocator's own counts, a walk over its events."""

import pickle
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cs336.analysis.memory.explain import explain_memory
from cs336.analysis.memory.profile import MemoryProfile
from cs336.report.sections.memory.compared import compared_snapshots
from cs336.report.sections.memory.findings import answer, findings
from tests.analysis.memory.programs import DrawnSnapshot, DrawnStack
from tests.analysis.memory.snapshots import MIB, Allocator

NUM_DRAWS, NUM_TESTS = 300, 6


def peak_bytes(allocator: Allocator) -> int:
    return max(truth.allocated for truth in allocator.truth)


def num_failures(allocator: Allocator) -> int:
    return sum(event["action"] == "oom" for event in allocator.events or [])


def chosen_device(drawn: DrawnSnapshot) -> set[int]:
    """The devices that ran out, else the fullest ones; of several that ran out the fullest."""
    devices = range(len(drawn.devices))
    ran_out = [device for device in devices if num_failures(drawn.devices[device])]
    peaks = {device: peak_bytes(drawn.devices[device]) for device in ran_out or devices}
    return {device for device, peak in peaks.items() if peak == max(peaks.values())}


def from_driver(requested: int, is_expandable: bool) -> int:
    """As c10/cuda/CUDACachingAllocator.cpp asks the driver, or maps pages."""
    if requested <= MIB:
        return 2 * MIB
    if is_expandable:
        return -(-requested // (20 * MIB)) * 20 * MIB
    return 20 * MIB if requested < 10 * MIB else -(-requested // (2 * MIB)) * 2 * MIB


def check_failure(profile: MemoryProfile, allocator: Allocator, numbers: Any) -> None:
    """The first failed request, and what was reserved in which pool."""
    events = allocator.events or []
    first = next(row for row, event in enumerate(events) if event["action"] == "oom")
    event, truth = events[first], allocator.truth[first]
    assert numbers["out_of_memory"] == num_failures(allocator)
    assert numbers["event"] == first
    assert (numbers["requested_bytes"], numbers["free_bytes"]) == (
        event["size"],
        event["device_free"],
    )
    needed = from_driver(event["size"], allocator.is_expandable)
    assert numbers["short_bytes"] == max(needed - event["device_free"], 0)
    assert numbers["reserved_bytes"] == truth.reserved
    failure = profile.work.first_failure
    assert failure is not None
    assert sum(pool.reserved_bytes for pool in failure.pools) == truth.reserved
    assert sum(pool.used_bytes for pool in failure.pools) == truth.active
    seen: dict[tuple[bool, bool], list[int]] = {}
    for pool in failure.pools:
        if pool.pool is not None:
            assert pool.is_small is not None
            assert pool.is_expandable is allocator.is_expandable
            amounts = seen.setdefault((pool.pool > 0, pool.is_small), [0, 0])
            amounts[0] += pool.reserved_bytes
            amounts[1] += pool.used_bytes
    real: dict[tuple[bool, bool], list[int]] = {}
    for ((graph, number), is_small), (reserved, used) in allocator.failures[0].items():
        amounts = real.setdefault((bool(graph or number), is_small), [0, 0])
        amounts[0] += reserved
        amounts[1] += used
    is_exact = all(pool.pool is not None for pool in failure.pools)
    for kind, (reserved, _) in seen.items():
        assert reserved <= real[kind][0]
    if is_exact:
        assert seen == {kind: amounts for kind, amounts in real.items() if any(amounts)}
    idle = sum(reserved - used for (private, _), (reserved, used) in real.items() if private)
    assert numbers["idle_private_bytes"] == idle, "private pools are kept"


def largest(drawn: DrawnSnapshot, allocator: Allocator) -> Counter[str]:
    """At the peak, bytes by label, else by place and module."""
    events = allocator.events or []
    peak = [truth.allocated for truth in allocator.truth].index(peak_bytes(allocator))
    size_of = {address: size for address, size, _ in allocator.truth[peak].in_use}
    made: dict[int, str] = {}
    for event in events[:peak]:
        if event["action"] == "alloc":
            stack = drawn.stack_of.get(id(event.get("frames")), DrawnStack([]))
            where = " in ".join(part for part in (stack.place, stack.module) if part)
            made[event["addr"]] = event["user_metadata"] or (f"made at {where}" if where else "")
        elif event["action"] == "free_requested":
            made.pop(event["addr"], None)
    bytes_of = Counter[str]()
    for address, name in made.items():
        bytes_of[name] += size_of[address]
    return bytes_of


def check(seed: int, folder: Path) -> Counter[str]:
    """Compare all that is said of a drawn snapshot; the codes of what was said."""
    drawn = DrawnSnapshot(seed)
    path = drawn.write(folder)
    profile = explain_memory(path)
    assert profile.device in chosen_device(drawn)
    allocator = drawn.devices[profile.device]
    peak = profile.peak
    assert peak.allocated_bytes == peak_bytes(allocator)
    assert sum(part.num_bytes for part in peak.categories) == peak.allocated_bytes
    assert profile.peak_reserved_bytes == max(truth.reserved for truth in allocator.truth)
    assert (peak.time_s is not None) == drawn.has_times or not allocator.events
    is_broken = drawn.is_timed and not drawn.has_times and bool(allocator.events)
    assert any("run backwards or stand still" in note for note in profile.notes) == is_broken
    moment = [truth.allocated for truth in allocator.truth].index(peak.allocated_bytes)
    if drawn.has_times and len(drawn.devices) == 1 and moment:
        assert peak.ranges == drawn.ranges_at[moment - 1]
    elif len(drawn.devices) > 1 or not drawn.has_times:
        assert not peak.ranges
    said = [*dict.fromkeys((finding.code, finding.text) for finding in answer(profile))]
    for finding in {f.text: f for f in (*answer(profile), *findings(profile))}.values():
        said.append((finding.code, finding.text))
        numbers = finding.numbers
        if finding.code == "out of memory":
            check_failure(profile, allocator, numbers)
        elif finding.code == "other device":
            other = drawn.devices[int(numbers["device"])]
            assert numbers["peak_bytes"] == peak_bytes(other)
            assert numbers["out_of_memory"] == num_failures(other)
        elif finding.code == "largest":
            truth = largest(drawn, allocator)
            for name, num_bytes in numbers.items():
                if name.startswith("made at"):
                    assert num_bytes == truth[name], name
                else:
                    assert num_bytes <= truth[name.partition(" (")[0]], name
        if not drawn.has_times:
            assert "after the first event" not in finding.text
        if not drawn.has_frames:
            assert "made at" not in finding.text
    assert ("out of memory" in dict(said)) == bool(num_failures(allocator))
    for device in range(len(drawn.devices)):
        assert explain_memory(path, device).peak.allocated_bytes == peak_bytes(
            drawn.devices[device]
        )
    return Counter(code for code, _ in said)


@pytest.mark.parametrize("part", range(NUM_TESTS))
def test_nothing_false_is_said_of_drawn_snapshots(part: int, tmp_path: Path) -> None:
    codes = Counter[str]()
    for seed in range(part, NUM_DRAWS, NUM_TESTS):
        codes += check(seed, tmp_path)
    assert {"out of memory", "other device", "largest", "peak", "reserved"} <= {*codes}


@pytest.mark.parametrize("seed", range(40))
def test_reserved_memory_is_a_lower_bound_where_segments_are_missing(
    seed: int, tmp_path: Path
) -> None:
    """Segments that a drawn snapshot has in use are taken out of the file."""
    drawn = DrawnSnapshot(seed)
    path = drawn.write(tmp_path)
    device = explain_memory(path).device
    content = pickle.loads(path.read_bytes())
    used = [
        segment
        for segment in content["segments"]
        if segment["device"] == device
        and any(block["state"] == "active_allocated" for block in segment["blocks"])
    ]
    lost = random.Random(seed).sample(used, min(len(used), 1 + seed % 3))
    content["segments"] = [segment for segment in content["segments"] if segment not in lost]
    path.write_bytes(pickle.dumps(content))
    profile = explain_memory(path, device)
    true_bytes = max(truth.reserved for truth in drawn.devices[device].truth)
    assert profile.peak_reserved_bytes <= true_bytes
    for finding in answer(profile):
        if finding.code == "reserved":
            assert ("or more" in finding.text) is profile.lacks_segments
    if profile.peak_reserved_bytes < true_bytes:
        assert profile.lacks_segments
    said = {finding.code: finding.text for finding in answer(profile)}
    assert ("or more" in said["peak"].partition(";")[0]) is profile.lacks_segments
    true_peak = peak_bytes(drawn.devices[device])
    assert profile.peak.allocated_bytes <= true_peak
    if profile.peak.allocated_bytes < true_peak:
        assert profile.lacks_segments


@pytest.mark.parametrize("seed", range(40))
def test_a_peak_of_events_that_contradict_each_other_is_in_doubt(seed: int, tmp_path: Path) -> None:
    """A share of the frees is lost; a walk over the events finds what is allocated while in use."""
    drawn = DrawnSnapshot(seed)
    content = pickle.loads(drawn.write(tmp_path).read_bytes())
    rng, share = random.Random(seed), [0.0, 0.05, 0.3, 1.0][seed % 4]
    wrong: list[float] = []
    for device, trace in enumerate(content["device_traces"]):
        lost, in_use, count = set[int](), set[int](), 0
        kept = []
        for event in trace:
            action, address = event["action"], event.get("addr", 0)
            if action == "free_requested" and rng.random() < share:
                lost.add(address)
            is_free = action.startswith("free")
            if action == "alloc":
                count += address in in_use
                in_use.add(address)
            elif is_free and address not in lost:
                in_use.discard(address)
            if not (is_free and address in lost):
                kept.append(event)
            elif action == "free_completed":
                lost.discard(address)
        content["device_traces"][device] = kept
        wrong.append(count / max(len(kept), 1))
    path = tmp_path / "lost.pickle"
    path.write_bytes(pickle.dumps(content))
    for device, part in enumerate(wrong):
        profile = explain_memory(path, device)
        said = {finding.code: finding.text for finding in answer(profile)}
        if "peak" in said:
            assert ("in doubt" in said["peak"]) is bool(profile.doubts)
        assert bool(profile.doubts) is (part >= 0.01)
        told = [finding.text for finding in compared_snapshots(profile, profile, 5).findings]
        assert any("A's peak is in doubt" in text for text in told) is bool(profile.doubts)
