"""Hand-made memory profiles, small enough to work out by hand; all sizes here are MiB.

make_memory, two training steps of 30 ms each:

                  parameters  optimizer state  gradients  saved  temporary  held   allocated
                  reserved
    start                100              200          0      0          0    10         310
    900 end of forward       100              200          0    400          0    10         710
    900 peak, backward       100              200         40    380         50    10         780
    900 end of backward      100              200        100      0          0    10         410
    900 end of optimizer     100              200          0      0          0    10         310
    900

Blocks are as large as what was asked for, but that 3 of the temporary ones at the peak are
rounding. Peaks of the phases: forward 710, backward 780, optimizer 415.

make_inference, one step of 10 ms: parameters 100, temporary 0, 60 at the peak, 0; reserved 200.
make_bare, a snapshot without notes: held 1000, temporary 500 at the peak; reserved 2000; nothing
else is known. make_oom, make_memory whose second forward asks for 300 at 35 ms, when 530 are
allocated, 900 reserved and 120 free.
"""

from dataclasses import replace

from cs336.analysis.memory.profile import (
    AllocatorWork,
    BlockMemory,
    Category,
    CategoryBytes,
    FailedRequest,
    LikeAllocations,
    MemoryProfile,
    Moment,
    PhaseMemory,
    Place,
    SavedTensor,
    Timeline,
)

PARAMETERS, OPTIMIZER_STATE, GRADIENTS, SAVED, TEMPORARY, HELD = (
    Category.PARAMETERS,
    Category.OPTIMIZER_STATE,
    Category.GRADIENTS,
    Category.SAVED,
    Category.TEMPORARY,
    Category.HELD,
)
OPTIONAL = (Category.EARLIER, Category.KEPT, Category.POOL)
"""Categories that only snapshots of other programs, or of CUDA graphs, have."""
MIB = 2**20
NAMES = {
    PARAMETERS: 11,
    OPTIMIZER_STATE: 22,
    GRADIENTS: 4,
    SAVED: 38,
    TEMPORARY: 5,
    HELD: 1,
    Category.LATER: 6,
}
"""Number of blocks of each category, wherever there is any of it."""


def make_moment(phase, time_ms, reserved, step=0, counted=True, rounding=(), **sizes):
    """`sizes` by name of the category, in MiB; of these, `rounding` was not asked for."""
    lost = dict(rounding)
    found = tuple(
        CategoryBytes(
            category=Category[name.upper()],
            num_bytes=round(value * MIB),
            requested_bytes=round((value - lost.get(name, 0)) * MIB),
            count=NAMES[Category[name.upper()]],
        )
        for name, value in sizes.items()
        if value
    )
    allocated, requested = (
        sum(getattr(row, field) for row in found) for field in ("num_bytes", "requested_bytes")
    )
    return Moment(
        step=step,
        phase=phase,
        time_s=time_ms / 1e3,
        allocated_bytes=allocated,
        reserved_bytes=reserved * MIB,
        categories=found,
        counted_bytes=allocated if counted else None,
        counted_requested_bytes=requested if counted else None,
    )


def make_phase(step, phase, times_ms, peak):
    """Times of the begin and the end; the peak in MiB."""
    begin_s, end_s = (time / 1e3 for time in times_ms)
    return PhaseMemory(step=step, phase=phase, begin_s=begin_s, end_s=end_s, peak_bytes=peak * MIB)


def make_timeline(times_ms, reserved, **sizes):
    """Each of `sizes` in MiB, one for each time."""
    return Timeline(
        time_s=tuple(time_ms / 1e3 for time_ms in times_ms),
        categories=tuple(Category[name.upper()] for name in sizes),
        num_bytes=tuple(tuple(round(value * MIB) for value in values) for values in sizes.values()),
        reserved_bytes=tuple(reserved * MIB for _ in times_ms),
    )


def make_like(size, count=1, count_at_peak=1, category=TEMPORARY, **fields):
    return LikeAllocations(
        **{
            "num_bytes": round(size * MIB),
            "requested_bytes": round(size * MIB),
            "count": count,
            "count_at_peak": count_at_peak,
            "bytes_at_peak": round(size * MIB) * count_at_peak,
            "category": category,
            "name": "",
            "shape": (),
            "dtype": "",
            "phase": "",
            "places": (),
            **fields,
        }
    )


SOFTMAX = Place(file="cs336_systems/model.py", line=77, function="softmax")
CALLER = Place(file="project/benchmark.py", line=3, function="<module>")
WEIGHTS = make_like(
    20,
    24,
    10,
    SAVED,
    name="block.* > attention > attention.softmax",
    shape=(4, 5, 512, 512),
    dtype="float32",
    phase="forward",
    places=(SOFTMAX, CALLER),
)
LOGITS = make_like(
    50, 2, 1, TEMPORARY, name="lm_head", phase="backward", shape=(4, 512, 6400), dtype="float32"
)
MOMENTS = make_like(10, 20, 20, OPTIMIZER_STATE, name="layers.*.ffn.w1.weight", dtype="float32")


def make_saved(name, size, shape=()):
    return SavedTensor(
        name=name, shape=shape, dtype="float32", num_bytes=round(size * MIB), is_recomputed=False
    )


def make_block(index, weights=20):
    """Saves `weights` + 18 + 12 + 6 + 3 + 1 MiB; 10 MiB of parameters and of gradients."""
    saved = (
        make_saved("attention > attention.softmax", weights, (4, 5, 512, 512)),
        make_saved("ffn", 18, (4, 512, 2304)),
        make_saved("ffn", 12),
        make_saved("attention", 6),
        make_saved("norm", 3),
        make_saved("", 1),
    )
    return BlockMemory(
        name=f"block.{index}",
        saved_bytes=sum(tensor.num_bytes for tensor in saved),
        saved=saved,
        parameter_bytes=10 * MIB,
        gradient_bytes=10 * MIB,
    )


def make_boundaries(step, begin_ms):
    kept = {"parameters": 100, "optimizer_state": 200, "held": 10}
    return (
        make_moment("start", begin_ms, 900, step, **kept),
        make_moment("forward", begin_ms + 10, 900, step, **kept, saved=400),
        make_moment("backward", begin_ms + 20, 900, step, **kept, gradients=100),
        make_moment("optimizer", begin_ms + 30, 900, step, **kept),
    )


def make_phases(step, begin_ms):
    return (
        make_phase(step, "forward", (begin_ms, begin_ms + 10), 710),
        make_phase(step, "backward", (begin_ms + 10, begin_ms + 20), 780),
        make_phase(step, "optimizer", (begin_ms + 20, begin_ms + 30), 415),
    )


def make_memory(**changes):
    """Of a training run; see above."""
    moves = {
        "gradients": (0, 0, 0, 40, 100, 100),
        "saved": (0, 200, 400, 380, 0, 0),
        "temporary": (0, 20, 0, 50, 0, 5),
    }
    profile = MemoryProfile(
        source="small.pickle",
        device=0,
        num_steps=2,
        held_bytes=310 * MIB,
        peak=make_moment(
            "backward",
            13,
            900,
            counted=False,
            parameters=100,
            optimizer_state=200,
            gradients=40,
            saved=380,
            temporary=50,
            held=10,
            rounding={"temporary": 3},
        ),
        peak_requested_bytes=777 * MIB,
        peak_reserved_bytes=900 * MIB,
        boundaries=(*make_boundaries(0, 0), *make_boundaries(1, 30)),
        phases=(*make_phases(0, 0), *make_phases(1, 30)),
        largest=(LOGITS, WEIGHTS, MOMENTS),
        at_peak=(MOMENTS, WEIGHTS, LOGITS),
        blocks=(make_block(0, 21), make_block(1), make_block(2), make_block(3)),
        timeline=make_timeline(
            (0, 5, 10, 13, 20, 25, 30, 35, 40, 43, 50, 55, 60),
            900,
            held=[10] * 13,
            parameters=[100] * 13,
            optimizer_state=[200] * 13,
            **{name: [*values, *values, 0] for name, values in moves.items()},
        ),
        work=AllocatorWork(
            events=3600, segments_allocated=0, segments_freed=0, out_of_memory=0, first_failure=None
        ),
        outside_bytes=700 * MIB,
        notes=("two blocks were joined",),
    )
    return replace(profile, **changes)


def make_inference(**changes):
    """Of a forward pass without a graph; see above."""
    profile = make_memory(
        num_steps=1,
        peak=make_moment("forward", 6, 200, counted=False, parameters=100, temporary=60),
        peak_requested_bytes=160 * MIB,
        peak_reserved_bytes=200 * MIB,
        boundaries=(
            make_moment("start", 0, 200, parameters=100),
            make_moment("forward", 10, 200, parameters=100),
        ),
        phases=(make_phase(0, "forward", (0, 10), 160),),
        largest=(make_like(30, 4, 2),),
        at_peak=(make_like(30, 4, 2),),
        blocks=(),
        timeline=make_timeline((0, 6, 10), 200, parameters=[100] * 3, temporary=[0, 60, 0]),
        held_bytes=100 * MIB,
    )
    return replace(profile, **changes)


def make_bare(**changes):
    """Of a program that left nothing but a snapshot; see above."""
    profile = make_inference(
        source="other.pickle",
        num_steps=0,
        peak=make_moment("", 6, 2000, step=-1, counted=False, held=1000, temporary=500),
        peak_requested_bytes=1500 * MIB,
        peak_reserved_bytes=2000 * MIB,
        boundaries=(),
        phases=(),
        timeline=make_timeline((0, 6, 10), 2000, held=[1000] * 3, temporary=[0, 500, 0]),
        held_bytes=1000 * MIB,
        outside_bytes=None,
        notes=(),
    )
    return replace(profile, **changes)


def make_oom(**changes):
    """The training run of which the second forward asks for 300 MiB where 120 are free."""
    failure = FailedRequest(
        requested_bytes=300 * MIB,
        free_bytes=120 * MIB,
        allocated_bytes=530 * MIB,
        reserved_bytes=900 * MIB,
        step=1,
        phase="forward",
        time_s=0.035,
        event=1999,
        places=(SOFTMAX, CALLER),
    )
    whole = make_memory(
        boundaries=make_memory().boundaries[:5],
        phases=(*make_phases(0, 0), make_phase(1, "forward", (30, 35), 530)),
        work=AllocatorWork(
            events=2100,
            segments_allocated=9,
            segments_freed=4,
            out_of_memory=2,
            first_failure=failure,
        ),
    )
    return replace(whole, **changes)
