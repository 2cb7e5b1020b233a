"""Groups of like allocations, and the phase of a peak."""

from pathlib import Path

from cs336_systems.analysis.memory.explain import explain_memory
from cs336_systems.analysis.memory.notes import Kind
from cs336_systems.analysis.memory.profile import LikeAllocations, MemoryProfile
from tests.analysis.memory.programs import Program
from tests.analysis.memory.snapshots import MIB, frame


def row_of(profile: MemoryProfile, requested_bytes: int) -> LikeAllocations:
    (row,) = {group for group in (*profile.largest, *profile.at_peak) if group.requested_bytes == requested_bytes}
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
        next(row for row in rows if row.requested_bytes == 5 * MIB // 2) for rows in (profile.at_peak, profile.largest)
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
        program.see(Kind.SAVED, "forward > block.0 > ffn", program.malloc(4096, frames=stack), shape, dtype)
    program.see(Kind.SAVED, "forward > block.0 > ffn", program.malloc(8192, frames=[inner, outer]), (2048,))
    program.malloc(512)
    profile = explain_memory(program.write(tmp_path))
    mixed, alike = row_of(profile, 4096), row_of(profile, 8192)
    assert (mixed.count, mixed.shape, mixed.dtype) == (3, (), "")
    assert (alike.count, alike.shape, alike.dtype) == (1, (2048,), "float32")
    assert [place.line for place in mixed.places] == [place.line for place in alike.places] == [43, 7]
