import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from cs336.analysis.columns import ProfileError
from cs336.analysis.memory.categories import NOT_SIGHTED, resolve
from cs336.analysis.memory.explain import MAX_POINTS, explain_memory
from cs336.analysis.memory.notes import MemoryNotes, Position, SightingKind, notes_path, write_notes
from cs336.analysis.memory.phases import NO_MOMENT, moments_of
from cs336.analysis.memory.profile import Category, LikeAllocations, MemoryProfile, Moment, Place
from cs336.analysis.memory.replay import replay_device
from cs336.analysis.memory.snapshot import read_snapshot
from tests.analysis.memory.programs import BEFORE, STACK, Program, Training
from tests.analysis.memory.snapshots import MIB, frame, snapshot_of, use_at_random, write
from tests.report.sections.memory.profiles import OPTIONAL


@pytest.fixture
def training() -> Training:
    run = Training()
    for step in range(3):
        run.step(step)
    return run


@pytest.fixture
def explained(training: Training, tmp_path: Path) -> MemoryProfile:
    return explain_memory(training.end(tmp_path))


def by_category(moment: Moment) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Size of the blocks, number of blocks, and requested bytes of each category."""
    return (
        Counter({str(c.category): c.num_bytes for c in moment.categories}),
        Counter({str(c.category): c.count for c in moment.categories}),
        Counter({str(c.category): c.requested_bytes for c in moment.categories}),
    )


def test_categories_at_every_boundary_are_those_of_the_books(
    training: Training, explained: MemoryProfile
) -> None:
    assert [(moment.step, moment.phase) for moment in explained.boundaries] == [
        (step, phase)
        for step in range(3)
        for phase in ("start", "forward", "backward", "optimizer")
    ]
    program = training.program
    for moment, mark, books, blocks, requested in zip(
        explained.boundaries,
        program.marks,
        program.books,
        program.num_blocks,
        program.requested,
        strict=True,
    ):
        assert by_category(moment) == (books, blocks, requested)
        assert (
            moment.allocated_bytes
            == moment.counted_bytes
            == mark.allocated_bytes
            == sum(books.values())
        )
        assert moment.requested_bytes == moment.counted_requested_bytes == mark.requested_bytes
        assert moment.reserved_bytes == mark.reserved_bytes
    without_notes = (Category.LATER, *OPTIONAL)
    known = {str(category) for category in Category if category not in without_notes}
    assert {category for books in program.books for category in books} == known


def test_the_peak_is_the_largest_truth_and_its_groups_add_up_to_it(
    training: Training, explained: MemoryProfile
) -> None:
    truth = training.program.truth
    assert (
        explained.peak.allocated_bytes
        == max(t.allocated for t in truth)
        == sum(by_category(explained.peak)[0].values())
    )
    assert explained.peak_reserved_bytes == max(t.reserved for t in truth)
    assert sum(group.bytes_at_peak for group in explained.at_peak) == explained.peak.allocated_bytes
    told = [event["size"] for event in training.program.events if event["action"] == "alloc"]
    assert max(group.requested_bytes for group in explained.largest) == max(told)
    at_peak = max(truth, key=lambda t: t.allocated)
    assert explained.rounding_bytes_at_peak == sum(
        size - requested for _, size, requested in at_peak.in_use
    )
    assert explained.rounding_bytes_at_peak > 0
    assert explained.peak_requested_bytes == max(t.requested for t in truth)


def test_the_timeline_follows_the_truth(training: Training, explained: MemoryProfile) -> None:
    line = explained.timeline
    totals = np.array(line.num_bytes).sum(axis=0)
    truth = training.program.truth
    assert len(truth) == len(line.time_s) <= MAX_POINTS
    assert totals.tolist() == [t.allocated for t in truth]
    assert list(line.reserved_bytes) == [t.reserved for t in truth]
    assert line.categories[0] is Category.HELD
    assert line.categories[-1] is Category.TEMPORARY
    assert all(a <= b for a, b in pairwise(line.time_s))
    events = training.program.events
    assert line.time_s[-1] == pytest.approx((events[-1]["time_us"] - events[0]["time_us"]) / 1e6)


def test_peaks_of_phases_are_those_of_all_events(tmp_path: Path) -> None:
    """There are far more events than points of the timeline, so the peak of a phase may lie
    between points.
    """
    program, rng = Program(is_expandable=True), random.Random(4)
    use_at_random(program, rng, 60)
    program.record()
    for step in range(40):
        for name in ("start", "forward", "backward", "optimizer"):
            use_at_random(program, rng, rng.randrange(20, 60))
            program.mark(step, name)
    profile = explain_memory(program.write(tmp_path))
    assert len(program.truth) > 2 * MAX_POINTS
    assert len(profile.phases) == 3 * 40
    allocated = [truth.allocated for truth in program.truth]
    of_steps = [
        (program.moments[index - 1], program.moments[index], mark)
        for index, mark in enumerate(program.marks)
        if mark.name != "start"
    ]
    lost = 0
    for phase, (begin, end, mark) in zip(profile.phases, of_steps, strict=True):
        peak = max(range(begin, end + 1), key=allocated.__getitem__)
        assert (phase.step, phase.phase, phase.peak_bytes) == (
            mark.step,
            mark.name,
            allocated[peak],
        )
        points = zip(
            profile.timeline.time_s,
            np.array(profile.timeline.num_bytes).sum(axis=0).tolist(),
            strict=True,
        )
        lost += phase.peak_bytes not in {
            total for at, total in points if phase.begin_s <= at <= phase.end_s
        }
    assert lost, "points of the timeline would do, and this test shows nothing"
    totals = np.array(profile.timeline.num_bytes).sum(axis=0)
    assert len(totals) <= MAX_POINTS + len(program.marks) + 1, "and where phases end"
    assert totals.max() == max(allocated) == profile.peak.allocated_bytes


def test_each_block_saves_each_storage_once_and_nothing_that_is_shared(
    training: Training, explained: MemoryProfile
) -> None:
    assert [block.name for block in explained.blocks] == ["block.0", "block.1"]
    weight = training.program.blocks[training.weights[0]].requested
    for block, sizes in zip(explained.blocks, training.saved_sizes[:2], strict=True):
        assert sorted(tensor.num_bytes for tensor in block.saved) == sorted(sizes)
        assert block.saved_bytes == sum(sizes)
        assert block.parameter_bytes == block.gradient_bytes == weight == 96 * 320 * 4
        assert not any(tensor.is_recomputed for tensor in block.saved)
        names = {tensor.name for tensor in block.saved}
        assert names == {"attention > attention.softmax", "attention > attention.scores"}


def test_notes_whose_counts_contradict_the_events_are_refused(
    training: Training, tmp_path: Path
) -> None:
    path = training.end(tmp_path)
    notes = training.program.notes()
    marks = list(notes.marks)
    marks[5] = replace(marks[5], allocated_bytes=marks[5].allocated_bytes - 512)
    write_notes(replace(notes, marks=tuple(marks)), notes_path(path))
    with pytest.raises(ProfileError, match="forward of step 1"):
        explain_memory(path)


def test_a_phase_that_runs_out_of_memory_goes_on_to_the_end(tmp_path: Path) -> None:
    run = Training(limit_bytes=40 * MIB)
    run.forward(0)
    assert run.program.malloc(60 * MIB, frames=STACK) is None
    before, num_events = run.program.truth[-1], len(run.program.events) - 1
    run.program.malloc(MIB)  # by whoever reports it
    profile = explain_memory(run.end(tmp_path))
    failure = profile.work.first_failure
    assert (profile.work.out_of_memory, failure.requested_bytes) == (1, 60 * MIB)
    assert failure.free_bytes == 40 * MIB - before.reserved
    assert (failure.allocated_bytes, failure.reserved_bytes) == (before.allocated, before.reserved)
    assert (failure.step, failure.phase, failure.event) == (0, "backward", num_events)
    events = run.program.events
    assert failure.time_s == pytest.approx(
        (events[num_events]["time_us"] - events[0]["time_us"]) / 1e6
    )
    assert failure.places[0] == Place(file="lm/model.py", line=17, function="attend")
    assert [m.phase for m in profile.boundaries] == ["start", "forward"]
    assert [(p.phase, p.peak_bytes) for p in profile.phases][1:] == [("backward", before.allocated)]


def test_a_ring_that_has_lost_its_beginning_is_placed_from_its_end(
    training: Training, tmp_path: Path
) -> None:
    program = training.program
    lost = 25
    program.keep_last(len(program.events) - lost)
    profile = explain_memory(training.end(tmp_path))
    assert any("oldest events were dropped" in note for note in profile.notes)
    kept = len(profile.boundaries)
    assert 8 <= kept < len(program.marks)
    for moment, mark in zip(profile.boundaries, program.marks[-kept:], strict=True):
        assert (moment.step, moment.phase) == (mark.step, mark.name)
        assert moment.reserved_bytes == mark.reserved_bytes
        assert abs(moment.allocated_bytes - mark.allocated_bytes) <= MIB
    assert profile.boundaries[-1].allocated_bytes == program.marks[-1].allocated_bytes


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kept", [None, 700])
def test_a_sighting_finds_the_block_in_use_at_its_moment(
    tmp_path: Path, seed: int, kept: int | None
) -> None:
    rng, program = random.Random(seed), Program()
    use_at_random(program, rng, 150)
    program.record()
    truth: list[tuple[int, int] | None] = []
    for _ in range(120):
        use_at_random(program, rng, 5)
        if not (in_use := [b for b in program.blocks.values() if b.state == "active_allocated"]):
            continue
        block = rng.choice(in_use)
        inside = rng.randrange(block.requested) if rng.random() < 0.5 else 0
        program.see(SightingKind.SAVED, "", block.address + inside)
        truth.append((block.address, program.born[block.address]))
        free = {b.address for s in program.segments for b in s.blocks if b.state == "inactive"}
        program.sightings.append(replace(program.sightings[-1], address=rng.choice([*free, 4096])))
        truth.append(None)
    lost = 0 if kept is None else len(program.events) - kept
    if kept is not None:
        program.keep_last(kept)
    snapshot = read_snapshot(write(tmp_path / "random.pickle", snapshot_of(program)))
    (memory,) = snapshot.devices
    replayed = replay_device(memory, snapshot.settings)
    moments = moments_of([s.position for s in program.sightings], memory.events, program.position)
    rows = resolve(replayed.allocations, program.sightings, moments).tolist()
    profiled = [
        None
        if row == NOT_SIGHTED
        else (int(replayed.allocations.address[row]), int(replayed.allocations.start[row]))
        for row in rows
    ]
    expected = [
        None if moment == NO_MOMENT or was is None else (was[0], max(was[1] - lost, BEFORE))
        for moment, was in zip(moments.tolist(), truth, strict=True)
    ]
    assert profiled == expected
    assert sum(was is not None for was in expected) > (100 if kept is None else 20)


@pytest.mark.parametrize(
    "kinds",
    [
        (SightingKind.SAVED, SightingKind.PARAMETER),
        (SightingKind.SAVED, SightingKind.BUFFER),
        (SightingKind.BUFFER, SightingKind.PARAMETER),
        (SightingKind.GRADIENT, SightingKind.OPTIMIZER_STATE),
        (SightingKind.AUTOCAST_COPY, SightingKind.GRADIENT),
        (SightingKind.SAVED, SightingKind.AUTOCAST_COPY),
    ],
)
def test_of_several_sightings_the_stronger_kind_counts_and_then_the_first(
    tmp_path: Path, kinds: tuple[SightingKind, SightingKind]
) -> None:
    program = Program()
    program.record()
    address = program.malloc(1000)
    weak, strong = kinds
    for kind, name in ((weak, "weak"), (strong, "first"), (strong, "second"), (weak, "late")):
        program.see(kind, name, address, (250,))
    (group,) = explain_memory(program.write(tmp_path)).at_peak
    assert (group.category, group.name) == (Category(strong), "first")


def test_the_device_of_the_notes_is_explained(tmp_path: Path) -> None:
    other, program = Program(base=0x7000_0000_0000), Program()
    for allocator in (other, program):
        allocator.record()
    use_at_random(other, random.Random(1), 30)
    program.malloc(700)
    path = write(tmp_path / "two.pickle", snapshot_of(other, program))
    assert explain_memory(path).device == 0
    write_notes(replace(program.notes(), device=1), notes_path(path))
    profile = explain_memory(path)
    assert (profile.device, profile.peak.allocated_bytes) == (1, 1024)
    assert [other.device for other in profile.other_devices] == [0]
    assert explain_memory(path, 0).device == 0
    write_notes(replace(program.notes(), device=5), notes_path(path))
    with pytest.raises(ProfileError, match=r"device 5, .* got 0, 1"):
        explain_memory(path)


def _no_end(notes: MemoryNotes) -> MemoryNotes:
    return replace(notes, end=Position(allocations=2**60, frees=3))


def _nonsense(notes: MemoryNotes) -> MemoryNotes:
    return replace(notes, sightings=tuple(replace(s, address=2**63 - 1) for s in notes.sightings))


@pytest.mark.parametrize("change", [_no_end, _nonsense])
def test_notes_that_do_not_fit_are_left_out_and_counted(
    training: Training, tmp_path: Path, change: Callable[[MemoryNotes], MemoryNotes]
) -> None:
    path = training.end(tmp_path)
    write_notes(change(training.program.notes()), notes_path(path))
    assert any("Left out" in note for note in explain_memory(path).notes)


def test_what_backward_computes_again_belongs_to_its_block(tmp_path: Path) -> None:
    """A checkpoint around two blocks keeps the first one's input, which its norm saves too."""
    program = Program()
    program.record()
    program.mark(0, "start")
    kept = program.malloc(3000)
    program.see(SightingKind.SAVED, "step > forward > forward > block.0 > checkpoint", kept, (750,))
    program.mark(0, "forward")
    program.see(SightingKind.SAVED, "forward > block.0 > norm", kept, (750,))
    for block, size in enumerate((5000, 7000)):
        program.see(
            SightingKind.SAVED, f"forward > block.{block} > ffn", program.malloc(size), (size // 4,)
        )
    program.free(program.malloc(100))
    program.mark(0, "backward")
    first, second = explain_memory(program.write(tmp_path)).blocks
    assert [(t.name, t.num_bytes, t.is_recomputed) for t in first.saved] == [
        ("ffn", 5000, True),
        ("checkpoint", 3000, False),
    ]
    assert (first.saved_bytes, first.recomputed_bytes) == (8000, 5000)
    assert [(t.name, t.num_bytes, t.is_recomputed) for t in second.saved] == [("ffn", 7000, True)]


def test_frames_outside_of_installed_packages_are_the_place(tmp_path: Path) -> None:
    program = Program()
    program.record()
    program.malloc(100, frames=[frame("a", 3)])
    program.malloc(5000, frames=STACK[:3])
    large, small = explain_memory(program.write(tmp_path)).largest
    assert small.places == (Place(file="project/a.py", line=3, function="a"),)
    assert large.places == (Place(file="jaxtyping/_decorator.py", line=5, function="wrapped"),)


def row_of(profile: MemoryProfile, requested_bytes: int) -> LikeAllocations:
    (row,) = {
        group
        for group in (*profile.largest, *profile.at_peak)
        if group.requested_bytes == requested_bytes
    }
    return row


def test_a_peak_at_the_end_of_a_phase_is_in_it(tmp_path: Path) -> None:
    program = Program()
    program.record()
    program.mark(3, "start")
    address = program.malloc(MIB)
    program.mark(3, "forward")
    program.free(address)
    program.mark(3, "backward")
    assert address is not None
    peak = explain_memory(program.write(tmp_path)).peak
    assert (peak.step, peak.phase, peak.allocated_bytes) == (3, "forward", MIB)


def test_equal_requests_in_blocks_of_different_sizes_are_one_row(tmp_path: Path) -> None:
    program = Program()
    program.record()
    freed = program.malloc(3 * MIB)
    program.malloc(17 * MIB)  # does not fit behind it
    program.malloc(16 * MIB)
    program.free(freed)
    sizes = []
    for _ in range(3):
        address = program.malloc(5 * MIB // 2)
        sizes.append(program.blocks[address].size)
    program.free(address)
    program.malloc(4 * MIB)  # the peak, without one of them
    profile = explain_memory(program.write(tmp_path))
    assert len({*sizes[:2]}) > 1
    for row in (
        next(row for row in rows if row.requested_bytes == 5 * MIB // 2)
        for rows in (profile.at_peak, profile.largest)
    ):
        assert (row.count, row.count_at_peak) == (3, 2)
        assert (row.num_bytes, row.bytes_at_peak) == (max(sizes), sum(sizes[:2]))


def test_a_row_has_only_what_all_its_allocations_share(tmp_path: Path) -> None:
    """Three shapes with the same number of bytes, whose stacks share the two innermost lines."""
    program = Program()
    program.record()
    inner, outer = frame("norm", 43), frame("block", 7)
    for shape, dtype, stack in (
        ((4, 256), "float32", [inner, outer, frame("train", 1)]),
        ((1024,), "float32", [inner, outer, frame("train", 2)]),
        ((2048,), "bfloat16", [inner, outer]),
    ):
        program.see(
            SightingKind.SAVED,
            "forward > block.0 > ffn",
            program.malloc(4096, frames=stack),
            shape,
            dtype,
        )
    program.see(
        SightingKind.SAVED,
        "forward > block.0 > ffn",
        program.malloc(8192, frames=[inner, outer]),
        (2048,),
    )
    program.malloc(512)
    profile = explain_memory(program.write(tmp_path))
    mixed, alike = row_of(profile, 4096), row_of(profile, 8192)
    assert (mixed.count, mixed.shape, mixed.dtype) == (3, (), "")
    assert (alike.count, alike.shape, alike.dtype) == (1, (2048,), "float32")
    assert (
        [place.line for place in mixed.places] == [place.line for place in alike.places] == [43, 7]
    )
