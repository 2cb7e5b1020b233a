"""Explains a memory snapshot: what was allocated when, what it held, in which phase, and which code
allocated it.

The snapshot itself has sizes, times and stacks. What a block held and when phases ended is in the
notes beside it (notes.py), if there are any.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from ...text import counted, inert_line
from ..columns import NO_ROWS, Ints, ProfileError
from .blocks import block_memory
from .categories import NOT_SIGHTED, LiveSums, categorise, live_sums, resolve
from .groups import Groups, LabelledSnapshot
from .names import SEPARATOR
from .notes import START, Mark, MemoryNotes, notes_path, read_notes
from .phases import NO_MOMENT, NO_PHASES, find_phases, moments_of, notes_on_positions, times_s
from .profile import (
    CATEGORY_CODES,
    AllocatorWork,
    Category,
    FailedRequest,
    MemoryProfile,
    Moment,
    OtherDevice,
    PhaseMemory,
    Timeline,
)
from .replay import Replay, replay_device
from .snapshot import HOW_TO_SNAPSHOT, Action, Snapshot, read_snapshot
from .stacks import callers_of, code_places, module_of

MAX_POINTS = 2000
"""Points of a timeline."""
MAX_LARGEST = 50
"""Groups among the largest allocations."""
FROM_BOTTOM = (
    Category.HELD,
    Category.EARLIER,
    Category.PARAMETERS,
    Category.BUFFERS,
    Category.OPTIMIZER_STATE,
    Category.GRADIENTS,
    Category.AUTOCAST_COPIES,
    Category.KEPT,
    Category.POOL,
    Category.SAVED,
    Category.LATER,
    Category.TEMPORARY,
)
"""Order of categories in a picture over time, from the bottom: long-lived ones are below
short-lived ones.
"""


def explain_memory(path: Path, device: int | None = None) -> MemoryProfile:
    """Explain the snapshot at `path` with the notes beside it, if any.

    Without notes, the device is the one that ran out of memory, else the fullest, unless given.
    Raises ProfileError if the file is not a snapshot or the notes contradict it, and
    MemoryAttributionError if the categories do not add up.
    """
    beside = notes_path(path)
    notes = read_notes(beside) if beside.exists() else None
    snapshot = read_snapshot(path)
    if device is None and notes is not None:
        device = notes.device
    if notes is not None and notes.device != device:
        notes = None
    replays = _replays(snapshot, device)
    others = tuple(_other(replay) for replay in replays[1:])
    return _Explanation(snapshot, replays[0], notes, others).profile()


def _replays(snapshot: Snapshot, device: int | None) -> list[Replay]:
    """Replay every device: first the given one, else one that ran out of memory, else the
    fullest.
    """
    if not snapshot.devices:
        raise ProfileError(snapshot.path, f"no device has any memory in it; {HOW_TO_SNAPSHOT}")
    present = [memory.device for memory in snapshot.devices]
    if device not in (None, *present):
        devices = ", ".join(map(str, present))
        raise ProfileError(
            snapshot.path,
            f"needed memory of device {device}, as --device or the notes beside it say, got "
            f"{devices}",
        )
    replays = [replay_device(memory, snapshot.settings) for memory in snapshot.devices]

    def rank(replay: Replay) -> tuple[bool, bool, int]:
        """Sort key of a device, larger for the one to explain: the one that was asked for, then one
        that ran out of memory, then the one with the highest peak.
        """
        is_given = replay.memory.device == device
        return is_given, bool(replay.failed_requests), int(replay.allocated_bytes.max())

    return sorted(replays, key=rank, reverse=True)


def _other(replay: Replay) -> OtherDevice:
    """The peak of a device that is not explained."""
    return OtherDevice(
        device=replay.memory.device,
        peak_bytes=int(replay.allocated_bytes.max()),
        out_of_memory=len(replay.failed_requests),
    )


class _Explanation:
    """One device of a snapshot, and everything concluded from it."""

    def __init__(
        self,
        snapshot: Snapshot,
        replay: Replay,
        notes: MemoryNotes | None,
        others: tuple[OtherDevice, ...],
    ) -> None:
        """Find peak, phases and categories of a replayed snapshot; `notes` are what the program
        recorded beside it, and `others` are devices that are not explained.
        """
        memory = replay.memory
        self._snapshot, self._memory, self._notes = snapshot, memory, notes
        self._replay, self._others = replay, others
        self._allocated = self._replay.allocated_bytes
        self._peak = int(self._allocated.argmax())
        sightings = () if notes is None else notes.sightings
        self._phases, sighted_at = NO_PHASES, NO_ROWS

        if notes is not None:
            last_oom = max(self._replay.failed_requests, default=NO_MOMENT)
            self._phases = find_phases(memory.events, notes, last_oom)
            positions = [sighting.position for sighting in sightings]
            sighted_at = moments_of(positions, memory.events, notes.end)
        self._row_of = resolve(self._replay.allocations, sightings, sighted_at)
        callers = None if notes else callers_of(snapshot.stacks)
        category, sighting = categorise(self._replay, sightings, self._row_of, callers)
        self._labelled = LabelledSnapshot(
            replay=self._replay,
            stacks=snapshot.stacks,
            labels=snapshot.labels,
            category=category,
            sighting=sighting,
            sightings=sightings,
            row_of=self._row_of,
            sighted_at=sighted_at,
            phases=self._phases,
        )

    def profile(self) -> MemoryProfile:
        """The whole profile."""
        allocations, notes = self._replay.allocations, self._notes
        moments = np.union1d(self._points(), [*self._phases.moments, self._peak])
        sums = live_sums(self._replay, self._labelled.category, moments)
        outside_bytes = None
        if notes is not None:
            outside_bytes = notes.used_on_device_bytes - notes.reserved_bytes
        is_live = (allocations.start < self._peak) & (self._peak <= allocations.free_requested)
        is_held = self._replay.is_held_throughout
        like = Groups(self._labelled)
        is_expandable = self._snapshot.settings.get("expandable_segments") is True
        is_expandable |= bool(self._memory.segments.is_expandable.any())
        return MemoryProfile(
            source=inert_line(self._snapshot.path.name),
            device=self._memory.device,
            num_steps=len({mark.step for mark in self._phases.marks}),
            held_bytes=int(allocations.num_bytes[is_held].sum()),
            peak=self._peak_moment(sums),
            peak_requested_bytes=int(self._replay.requested_bytes.max()),
            peak_reserved_bytes=int(self._replay.reserved_bytes.max()),
            boundaries=tuple(self._boundaries(sums)),
            phases=tuple(self._phases_of_steps()),
            largest=like.largest(~is_held, is_live, MAX_LARGEST),
            at_peak=like.at_peak(is_live),
            blocks=block_memory(self._labelled),
            timeline=self._timeline(sums),
            work=self._work(),
            outside_bytes=outside_bytes,
            notes=tuple(self._notes_to_reader()),
            private_bytes=int(self._replay.private_bytes[self._peak]),
            idle_private_bytes=int(self._replay.idle_private_bytes[self._peak]),
            is_expandable=is_expandable,
            lacks_segments=self._replay.lacks_segments,
            doubts=self._replay.doubts,
            other_devices=self._others,
        )

    def _peak_moment(self, sums: LiveSums) -> Moment:
        """The memory when most was allocated."""
        step, phase = self._place(self._peak - 1)
        return self._moment(sums, self._peak, step, phase, None)

    def _place(self, event: int) -> tuple[int, str]:
        """The step and the phase in which the event happened."""
        stretch = int(self._phases.at(np.array(event)))
        return self._phases.steps[stretch], self._phases.names[stretch]

    @property
    def _has_times(self) -> bool:
        """Whether the snapshot's events have times, of a clock that runs."""
        return self._memory.events.has_clock

    def _time_s(self, moment: int) -> float | None:
        """Time of the last event before the moment; None if the file has no times."""
        if not self._has_times:
            return None
        return float(times_s(self._memory.events, np.array(moment)))

    def _ranges(self, moment: int) -> str:
        """The ranges that the program had open at the last event before the moment."""
        if not self._has_times or not moment:
            return ""
        names: list[str] = []
        for annotation in self._snapshot.annotations:
            if annotation.time_us > self._memory.events.time_us[moment - 1]:
                break
            if annotation.is_start:
                names.append(annotation.name)
            elif annotation.name in names:
                # the last of this name; ranges of other threads may lie between
                names.reverse()
                names.remove(annotation.name)
                names.reverse()
        return SEPARATOR.join(names)

    def _boundaries(self, sums: LiveSums) -> Iterator[Moment]:
        """The memory at the end of each phase; raise ProfileError if the bytes replayed from events
        differ from those that the notes counted there.
        """
        for mark, moment in zip(self._phases.marks, self._phases.moments.tolist(), strict=True):
            if self._replay.are_sizes_known and self._allocated[moment] != mark.allocated_bytes:
                raise ProfileError(
                    self._snapshot.path,
                    f"at the mark {mark.name} of step {mark.step} its events give "
                    f"{self._allocated[moment]} bytes, but the notes beside it count "
                    f"{mark.allocated_bytes}: they are not of one recording, or this program has "
                    "a defect",
                )
            yield self._moment(sums, moment, mark.step, mark.name, mark)

    def _phases_of_steps(self) -> Iterator[PhaseMemory]:
        """The phases from mark to mark, and after the last mark the phase that ran out of
        memory, if one did.
        """
        phases, moments = self._phases, self._phases.moments.tolist()
        for index, mark in enumerate(phases.marks[1:], start=1):
            if mark.name != START and mark.step == phases.marks[index - 1].step:
                yield self._phase_memory(index, moments[index - 1], moments[index])
        if phases.names[-1]:
            yield self._phase_memory(len(moments), moments[-1], self._replay.failed_requests[-1])

    def _phase_memory(self, stretch: int, begin: int, end: int) -> PhaseMemory:
        """Times and peak of allocated memory of one phase, from event `begin` to event `end`."""
        return PhaseMemory(
            step=self._phases.steps[stretch],
            phase=self._phases.names[stretch],
            begin_s=self._time_s(begin),
            end_s=self._time_s(end),
            peak_bytes=int(self._allocated[begin : end + 1].max()),
        )

    def _moment(
        self, sums: LiveSums, moment: int, step: int, phase: str, mark: Mark | None
    ) -> Moment:
        """Allocated and reserved memory after `moment` events, by category; with the allocator's
        own counts if the program noted a `mark` there.
        """
        return Moment(
            step=step,
            phase=phase,
            time_s=self._time_s(moment),
            allocated_bytes=int(self._allocated[moment]),
            reserved_bytes=int(self._replay.reserved_bytes[moment]),
            categories=sums.at(moment),
            counted_bytes=None if mark is None else mark.allocated_bytes,
            counted_requested_bytes=None if mark is None else mark.requested_bytes,
            ranges="" if mark else self._ranges(moment),
        )

    def _points(self) -> Ints:
        """Moments of the timeline: all if they are few, else the peak of each of MAX_POINTS
        equal intervals.
        """
        num_moments = len(self._allocated)
        if num_moments <= MAX_POINTS:
            return np.arange(num_moments)
        edges = np.linspace(0, num_moments, MAX_POINTS + 1).astype(np.int64)
        intervals = pairwise(edges.tolist())
        peaks = [begin + self._allocated[begin:end].argmax() for begin, end in intervals]
        return np.array(peaks, dtype=np.int64)

    def _timeline(self, sums: LiveSums) -> Timeline:
        """Bytes over time of each category that ever holds memory, and of reserved memory."""
        present = [
            category for category in FROM_BOTTOM if sums.counts[CATEGORY_CODES[category]].any()
        ]
        times = times_s(self._memory.events, sums.moments).tolist() if self._has_times else ()
        return Timeline(
            time_s=tuple(times),
            categories=tuple(present),
            num_bytes=tuple(
                tuple(sums.num_bytes[CATEGORY_CODES[category]].tolist()) for category in present
            ),
            reserved_bytes=tuple(self._replay.reserved_bytes[sums.moments].tolist()),
        )

    def _work(self) -> AllocatorWork:
        """How often the allocator asked the driver for memory, gave it back, and ran out of it."""
        counts = np.bincount(self._memory.events.action, minlength=len(Action))
        failed = self._replay.failed_requests
        return AllocatorWork(
            events=len(self._memory.events),
            segments_allocated=int(counts[Action.SEGMENT_ALLOC] + counts[Action.SEGMENT_MAP]),
            segments_freed=int(counts[Action.SEGMENT_FREE] + counts[Action.SEGMENT_UNMAP]),
            out_of_memory=len(failed),
            first_failure=self._failed_request(failed[0]) if failed else None,
        )

    def _failed_request(self, moment: int) -> FailedRequest:
        """The request for memory that failed at event `moment`, and what memory there was then."""
        events = self._memory.events
        step, phase = self._place(moment)
        stack = self._snapshot.stacks[events.stack[moment]]
        return FailedRequest(
            requested_bytes=int(events.num_bytes[moment]),
            free_bytes=int(events.address[moment]),
            allocated_bytes=int(self._allocated[moment]),
            reserved_bytes=int(self._replay.reserved_bytes[moment]),
            step=step,
            phase=phase,
            time_s=self._time_s(moment + 1),
            event=moment,
            places=code_places(stack),
            pools=self._replay.pools_at(moment),
            ranges=self._ranges(moment + 1),
            module=module_of(stack),
        )

    def _notes_to_reader(self) -> Iterator[str]:
        """Sentences on what the snapshot does not tell, and how to record it so that it does."""
        yield from self._snapshot.notes
        yield from self._replay.notes
        events = self._memory.events
        if events.time_us.any() and not events.has_clock:
            yield (
                "The times of the events run backwards or stand still: no time is told, and no "
                "range is placed by its time."
            )
        if not len(events):
            yield (
                f"No event was recorded, so only the memory at the end is known; {HOW_TO_SNAPSHOT}."
            )
        if self._notes is None:
            # with notes, the counts of allocations tell whether events were dropped
            if len(self._memory.events) and (num := self._replay.num_held_with_stack):
                yield (
                    f"Held throughout with a stack but without an event: {counted(num, 'block')}. "
                    "The oldest events were dropped (max_entries), or recording was begun anew."
                )
            yield (
                f"No notes beside the snapshot say what blocks of GPU {self._memory.device} held "
                "and when phases ended: record with --memory."
            )
            return
        yield from notes_on_positions(self._phases, self._notes, self._memory.events)
        if lost := int(np.count_nonzero(self._row_of == NOT_SIGHTED)):
            yield (
                f"Left out: {lost:,} of {len(self._row_of):,} sightings, whose addresses lay "
                "in no allocated block."
            )
