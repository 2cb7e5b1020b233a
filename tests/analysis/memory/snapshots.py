"""Makes memory snapshots as PyTorch writes them, by an allocator that works like its own and keeps
the true counts.

The rules are those of c10/cuda/CUDACachingAllocator.cpp: requests are rounded up to 512 bytes; up
to 1 MiB they are cut from segments of 2 MiB, larger ones from segments of 20 MiB or, from 10 MiB
on, of their own size rounded to 2 MiB; the smallest free block that fits is taken, and split if 512
bytes, or more than 1 MiB of a large block, remain; neighbours that are free are merged. Everything
is plain Python, one step after the other.
"""

import pickle
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

MIB = 2**20
SMALL, LARGE_SEGMENT, SMALL_SEGMENT, OWN_SEGMENT = MIB, 20 * MIB, 2 * MIB, 10 * MIB
FIRST_TIME_US = 1_754_257_323_206_535
NOTHING: list[Any] = []


def frame(name: str, line: int = 1) -> dict[str, Any]:
    return {"name": name, "filename": f"/home/user/project/{name}.py", "line": line}


@dataclass(eq=False)
class Block:
    address: int
    size: int
    segment: "Segment"
    state: str = "inactive"
    requested: int = 0
    event: int | None = None
    """The event that allocated it, counted from the beginning of time."""
    frames: list[Any] = field(default_factory=list)
    metadata: str = ""


@dataclass(eq=False)
class Segment:
    address: int
    size: int
    stream: int
    is_small: bool
    pool: tuple[int, int] = (0, 0)
    blocks: list[Block] = field(default_factory=list)


@dataclass(frozen=True)
class Truth:
    """What the allocator itself counts, after some number of events."""

    allocated: int
    active: int
    requested: int
    reserved: int
    in_use: frozenset[tuple[int, int, int]]
    """Address, block size and requested size."""


class Allocator:
    """One device's allocator. Its events are recorded from `record` on, with the truth after
    each.
    """

    def __init__(
        self,
        limit_bytes: int | None = None,
        is_expandable: bool = False,
        base: int = 0x7F00_0000_0000,
    ) -> None:
        self.limit_bytes, self.is_expandable = limit_bytes, is_expandable
        self.segments: list[Segment] = []
        self.blocks: dict[int, Block] = {}
        """Those in use, by address."""
        self.events: list[dict[str, Any]] | None = None
        self.truth: list[Truth] = []
        self.time_us = FIRST_TIME_US
        self.pool = (0, 0)
        """That of the calls from now on."""
        self.metadata = ""
        self.failures: list[dict[tuple[tuple[int, int], bool], list[int]]] = []
        """At each failed request, reserved and used bytes by pool and whether for small ones."""
        self._next_address = base
        self._num_events = 0
        self._counts = {"allocated": 0, "active": 0, "requested": 0, "reserved": 0}

    # recording

    def record(self) -> None:
        self.events = []
        self.truth = [self._now()]

    def keep_last(self, num_events: int) -> None:
        """As a ring that is full."""
        assert self.events is not None
        del self.events[:-num_events]
        del self.truth[: -num_events - 1]

    def _now(self) -> Truth:
        places = map(attrgetter("address", "size", "requested"), self.blocks.values())
        return Truth(**self._counts, in_use=frozenset(places))

    def _event(
        self,
        action: str,
        address: int,
        size: int,
        stream: int,
        frames: list[Any] | None,
        **changes: int,
    ) -> None:
        self.time_us += 3
        for name, change in changes.items():
            self._counts[name] += change
        if self.events is not None:
            key = "device_free" if action == "oom" else "addr"
            event: dict[str, Any] = {"action": action, key: address, "size": size, "stream": stream}
            event["time_us"] = self.time_us
            event["compile_context"] = "".join(["N", "/A"])  # a new string each time, as from C++
            event["user_metadata"] = self.metadata
            if frames is not None:
                event["frames"] = frames
            self.events.append(event)
            self.truth.append(self._now())

    def _by_pool(self) -> dict[tuple[tuple[int, int], bool], list[int]]:
        sums: dict[tuple[tuple[int, int], bool], list[int]] = {}
        for segment in self.segments:
            in_use = (block.size for block in segment.blocks if block.state != "inactive")
            amounts = sums.setdefault((segment.pool, segment.is_small), [0, 0])
            amounts[0] += segment.size
            amounts[1] += sum(in_use)
        return sums

    # the program's calls

    def malloc(
        self, requested: int, stream: int = 0, frames: list[Any] | None = NOTHING
    ) -> int | None:
        """The address of the block; None when out of memory."""
        size = max(-(-requested // 512), 1) * 512
        block = self._free_block(size, stream) or self._new_block(size, stream, frames)
        if block is None:
            self.empty_cache(frames)
            block = self._new_block(size, stream, frames)
        if block is None:
            assert self.limit_bytes is not None
            if self.events is not None:
                self.failures.append(self._by_pool())
            self._event("oom", self.limit_bytes - self._counts["reserved"], size, stream, frames)
            return None
        remaining = block.size - size
        if remaining >= 512 if block.segment.is_small or self.is_expandable else remaining > SMALL:
            rest = Block(block.address + size, remaining, block.segment)
            block.size = size
            block.segment.blocks.insert(block.segment.blocks.index(block) + 1, rest)
        block.state, block.requested, block.frames = "active_allocated", requested, frames or []
        block.metadata = self.metadata
        self.blocks[block.address] = block
        self._event(
            "alloc",
            block.address,
            requested,
            stream,
            frames,
            allocated=block.size,
            active=block.size,
            requested=requested,
        )
        return block.address

    def free(
        self, address: int, frames: list[Any] | None = NOTHING, is_used_elsewhere: bool = False
    ) -> None:
        """Give the block back; where another stream uses it, `finish` must follow."""
        block = self.blocks[address]
        block.state = "active_pending_free"
        stream = block.segment.stream
        self._event(
            "free_requested", address, block.requested, stream, frames, allocated=-block.size
        )
        if not is_used_elsewhere:
            self.finish(address, frames)

    def finish(self, address: int, frames: list[Any] | None = NOTHING) -> None:
        block = self.blocks.pop(address)
        size, segment = block.size, block.segment
        block.state, block.frames = "inactive", []
        self._event(
            "free_completed",
            address,
            block.requested,
            segment.stream,
            frames,
            active=-size,
            requested=-block.requested,
        )
        at = segment.blocks.index(block)
        if at + 1 < len(segment.blocks) and segment.blocks[at + 1].state == "inactive":
            block.size += segment.blocks.pop(at + 1).size
        if at and segment.blocks[at - 1].state == "inactive":
            segment.blocks[at - 1].size += segment.blocks.pop(at).size

    def empty_cache(self, frames: list[Any] | None = NOTHING) -> None:
        """Segments without a block in use go back to CUDA; of expandable ones, the free end."""
        for segment in list(self.segments):
            last = segment.blocks[-1]
            if segment.pool != (0, 0):
                continue
            if last.state != "inactive" or (len(segment.blocks) > 1 and not self.is_expandable):
                continue
            segment.blocks.pop()
            segment.size -= last.size
            if not segment.blocks:
                self.segments.remove(segment)
            action = "segment_unmap" if self.is_expandable else "segment_free"
            self._event(
                action, last.address, last.size, segment.stream, frames, reserved=-last.size
            )

    # finding memory

    def _free_block(self, size: int, stream: int) -> Block | None:
        fitting = [
            block
            for segment in self.segments
            if (segment.stream, segment.is_small, segment.pool)
            == (stream, size <= SMALL, self.pool)
            for block in segment.blocks
            if block.state == "inactive" and block.size >= size
        ]
        return min(fitting, key=lambda block: (block.size, block.address), default=None)

    def _new_block(self, size: int, stream: int, frames: list[Any] | None) -> Block | None:
        is_small = size <= SMALL
        if self.is_expandable:
            return self._mapped_block(size, stream, is_small, frames)
        segment_size = (
            SMALL_SEGMENT
            if is_small
            else LARGE_SEGMENT
            if size < OWN_SEGMENT
            else -(-size // (2 * MIB)) * 2 * MIB
        )
        if not self._has_room(segment_size):
            return None
        segment = Segment(self._next_address, segment_size, stream, is_small, self.pool)
        self._next_address += segment_size
        segment.blocks.append(Block(segment.address, segment_size, segment))
        self.segments.append(segment)
        self._event(
            "segment_alloc", segment.address, segment_size, stream, frames, reserved=segment_size
        )
        return segment.blocks[0]

    def _mapped_block(
        self, size: int, stream: int, is_small: bool, frames: list[Any] | None
    ) -> Block | None:
        """More memory behind the last block of the pool's only segment."""
        wanted = (stream, is_small, self.pool)
        of_pool = [s for s in self.segments if (s.stream, s.is_small, s.pool) == wanted]
        page = SMALL_SEGMENT if is_small else LARGE_SEGMENT
        new = Segment(self._next_address, 0, stream, is_small, self.pool)
        segment = of_pool[0] if of_pool else new
        spare = (
            segment.blocks[-1].size
            if segment.blocks and segment.blocks[-1].state == "inactive"
            else 0
        )
        more = -(-(size - spare) // page) * page
        if not self._has_room(more):
            return None
        if not of_pool:
            self._next_address += 2**40
            self.segments.append(segment)
        end = segment.address + segment.size
        segment.size += more
        if spare:
            segment.blocks[-1].size += more
        else:
            segment.blocks.append(Block(end, more, segment))
        self._event("segment_map", end, more, stream, frames, reserved=more)
        return segment.blocks[-1]

    def _has_room(self, size: int) -> bool:
        return self.limit_bytes is None or self._counts["reserved"] + size <= self.limit_bytes

    # the snapshot

    def segment_dicts(self, device: int = 0) -> list[dict[str, Any]]:
        return [
            {
                "device": device,
                "address": segment.address,
                "total_size": segment.size,
                "allocated_size": sum(
                    b.size for b in segment.blocks if b.state == "active_allocated"
                ),
                "active_size": sum(b.size for b in segment.blocks if b.state != "inactive"),
                "requested_size": sum(b.requested for b in segment.blocks if b.state != "inactive"),
                "stream": segment.stream,
                "segment_type": "small" if segment.is_small else "large",
                "segment_pool_id": segment.pool,
                "is_expandable": self.is_expandable,
                "frames": [],
                "blocks": [
                    {
                        "address": b.address,
                        "size": b.size,
                        "requested_size": b.requested,
                        "state": b.state,
                        "frames": b.frames,
                        "user_metadata": b.metadata,
                    }
                    for b in segment.blocks
                ],
            }
            for segment in self.segments
        ]


SETTINGS = {
    "PYTORCH_CUDA_ALLOC_CONF": "",
    "max_split_size": -1,
    "garbage_collection_threshold": 0.0,
    "expandable_segments": False,
    "roundup_power2_divisions": {"1": 0, "2": 0},
}


def snapshot_of(*allocators: Allocator, **top: Any) -> dict[str, Any]:
    """The dict that `torch.cuda.memory._snapshot()` returns, of one device for each allocator."""
    return {
        "segments": [
            s
            for device, allocator in enumerate(allocators)
            for s in allocator.segment_dicts(device)
        ],
        "device_traces": [allocator.events or [] for allocator in allocators],
        "allocator_settings": {
            **SETTINGS,
            "expandable_segments": allocators[0].is_expandable if allocators else False,
        },
        "external_annotations": [],
        **top,
    }


def write(path: Path, content: object, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(content, protocol))
    return path


def some_size(rng: random.Random) -> int:
    return rng.choice(
        [
            rng.randrange(1, 2000),
            rng.randrange(2000, MIB),
            rng.randrange(MIB, 4 * MIB),
            MIB,
            MIB + 1,
            rng.randrange(4 * MIB, 12 * MIB),
            rng.randrange(12 * MIB, 40 * MIB),
        ]
    )


def use_at_random(
    allocator: Allocator,
    rng: random.Random,
    num_calls: int,
    stacks: Sequence[list[Any] | None] = (NOTHING,),
) -> None:
    """Allocate and free, in two streams, with frees that complete late and now and then an empty
    cache.
    """
    pending: list[int] = [
        b.address for b in allocator.blocks.values() if b.state == "active_pending_free"
    ]
    for _ in range(num_calls):
        dice, stack = rng.random(), rng.choice(stacks)
        in_use = [b.address for b in allocator.blocks.values() if b.state == "active_allocated"]
        if dice < 0.01:
            allocator.empty_cache(stack)
        elif pending and dice < 0.08:
            allocator.finish(pending.pop(rng.randrange(len(pending))), stack)
        elif in_use and dice < 0.5 + 0.005 * (len(in_use) - 30):
            address, is_late = rng.choice(in_use), rng.random() < 0.1
            allocator.free(address, list(stack) if stack else stack, is_late)
            pending += [address] * is_late
        else:
            allocator.malloc(
                some_size(rng), stream=rng.choice([0, 0, 0, 0x5555_6666]), frames=stack
            )


def some_stacks(num_frames: int = 60, num_stacks: int = 20, seed: int = 0) -> list[list[Any]]:
    rng = random.Random(seed)
    frames = [frame(f"function_{i}", i) for i in range(num_frames)]
    return [[*rng.sample(frames, rng.randrange(0, 12))] for _ in range(num_stacks - 1)] + [[]]
