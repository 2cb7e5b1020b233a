"""Known causes in hand-made memory profiles (see profiles.py), each named with its numbers."""

from dataclasses import replace

import pytest

from cs336.analysis.memory.profile import Category, Place
from cs336.report.sections.memory.findings import answer, findings
from tests.report.sections.memory.profiles import (
    MIB,
    WEIGHTS,
    make_bare,
    make_boundaries,
    make_like,
    make_memory,
    make_moment,
    make_oom,
    make_phase,
    make_phases,
)


def texts(profile):
    return [finding.text for finding in findings(profile)]


def said(profile):
    return " ".join(texts(profile))


def first_steps():
    """Optimizer state of 200 MiB appears at the end of step 0, which peaks at 580, step 1 at
    780.
    """
    start, forward, backward, end = make_boundaries(0, 0)
    early = tuple(
        make_moment(moment.phase, moment.time_s * 1e3, 900, 0, **sizes)
        for moment, sizes in (
            (start, {"parameters": 100, "held": 10}),
            (forward, {"parameters": 100, "held": 10, "saved": 400}),
            (backward, {"parameters": 100, "held": 10, "gradients": 100}),
        )
    )
    peak = make_moment(
        "backward",
        43,
        900,
        1,
        counted=False,
        parameters=100,
        optimizer_state=200,
        gradients=40,
        saved=380,
        temporary=50,
        held=10,
    )
    phases = (
        make_phase(0, "forward", (0, 10), 510),
        make_phase(0, "backward", (10, 20), 580),
        make_phase(0, "optimizer", (20, 30), 415),
    )
    return make_memory(
        peak=peak,
        phases=(*phases, *make_phases(1, 30)),
        boundaries=(*early, end, *make_boundaries(1, 30)),
    )


def test_out_of_memory_comes_first_with_what_was_asked_and_free() -> None:
    """PyTorch has 370 MiB that no block uses: with 120 free that would do for 300, with 179 less
    of its own not.
    """
    first = findings(make_oom())[0].text
    told = (
        "GPU 0 ran out of memory 2 times, first 35.0 ms after the first event, in forward of step "
        "1, at cs336_systems/model.py:77 softmax, after 1,999 of 2,100 events: 300.0 MiB were "
        "asked for and 120.0 MiB were free on the device."
    )
    assert first.startswith(
        f"{told} 180.0 MiB more would have been enough. PyTorch itself held 370.0 MiB that no "
        "block used then, in pieces: PYTORCH_CUDA"
    )
    work = make_oom().work
    full = replace(
        work, out_of_memory=1, first_failure=replace(work.first_failure, reserved_bytes=709 * MIB)
    )
    assert findings(make_oom(work=full))[0].text == (
        told.replace("2 times, first", "1 time,") + " 180.0 MiB more would have been enough."
    )


@pytest.mark.parametrize(("reserved", "told"), [(1030, False), (1040, True)])
def test_fragmentation_is_told_from_256_mib(reserved: int, told: bool) -> None:
    """780 of 1,040 MiB leave 260, 25 %; 780 of 1,030 leave 250."""
    profile = make_memory(peak=replace(make_memory().peak, reserved_bytes=reserved * MIB))
    assert (
        "At the peak 260.0 MiB of the 1.02 GiB that PyTorch has reserved, 25.0 %" in said(profile)
    ) is told


def test_what_is_held_until_later_has_its_places() -> None:
    """900 of 1,500 MiB in a snapshot of somebody else's: 600 at one line, 200 at another, 100 at
    none.
    """

    def later(size, places=()):
        return make_like(size, category=Category.LATER, bytes_at_peak=size * MIB, places=places)

    line, other = WEIGHTS.places, (Place(file="lm/model.py", line=3, function="forward"),)
    profile = make_bare(
        peak=make_moment("", 5, 2000, -1, counted=False, held=600, later=900),
        at_peak=(later(400, line), later(200, other), later(200, line), later(100), make_like(50)),
    )
    (text,) = [text for text in texts(profile) if text.startswith("900.0 MiB of the peak, 60.0 %")]
    places = ("cs336_systems/model.py:77 softmax", "lm/model.py:3 forward")
    assert f"(600.0 MiB at {places[0]}, 200.0 MiB at {places[1]})" in text
    assert "not seen what they are" in text
    assert not [text for text in texts(make_memory()) if "autograd" in text], (
        "what has notes is told by them"
    )


def test_the_first_step_is_not_what_a_run_needs() -> None:
    assert (
        "The optimizer's state, 200.0 MiB, appears during the recording: step 0 peaks at 580.0 "
        "MiB, step 1 at 780.0 MiB."
    ) in said(first_steps())
    one = replace(
        first_steps(),
        boundaries=first_steps().boundaries[:4],
        phases=first_steps().phases[:3],
        num_steps=1,
    )
    assert "this is the first step, and later ones need that much more" in said(one)
    assert "appears" not in said(make_memory())


@pytest.mark.parametrize(("leak", "told"), [(0, False), (0.5, False), (5, True)])
def test_steps_that_leave_memory_behind(leak: float, told: bool) -> None:
    """Of 780 MiB, 0.1 % are 0.78."""
    moments = [
        make_moment(
            phase, time, 900, step, parameters=100, temporary=1 + leak * (step + (phase != "start"))
        )
        for step, phase, time in (
            (0, "start", 0),
            (0, "optimizer", 30),
            (1, "start", 30),
            (1, "optimizer", 60),
        )
    ]
    assert (
        "Every step leaves 5.00 MiB or more behind, 10.00 MiB in 2 steps."
        in said(make_memory(boundaries=tuple(moments)))
    ) is told


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"outside_bytes": 3 * 2**30},
            "3.00 GiB of the device are used and not reserved by PyTorch",
        ),
        (
            {"work": replace(make_memory().work, segments_allocated=9, segments_freed=4)},
            "The allocator gave 4 segments back to the driver and asked it for 9",
        ),
    ],
)
def test_each_loss_is_named(changes: dict, text: str) -> None:
    assert text in said(make_memory(**changes))
    assert text.split(", ")[-1] not in said(make_memory())


def test_what_nothing_is_known_of_is_told() -> None:
    """1,000 of 1,500 MiB."""
    held = "1,000.0 MiB of the peak, 66.7 %, were there before the recording and after it"
    assert f"{held}: not seen what they are." in said(make_bare())
    sighted = make_moment("forward", 6, 2000, parameters=500, held=1000)
    assert f"{held}: not seen what they are." in said(make_memory(peak=sighted))


def test_the_answer_is_the_peak_its_largest_parts_and_what_was_reserved() -> None:
    """Of make_memory at the peak: 20 x 10 of the optimizer, 10 x 20 of softmax, 50 of the
    logits; 900 - 780 unused.
    """
    peak, parts, reserved = (finding.text for finding in answer(make_memory()))
    assert peak == texts(make_memory())[0]
    names = ("200.0 MiB layers.*.ffn.w1.weight", "200.0 MiB block.*", "50.00 MiB lm_head")
    assert all(part in parts for part in names)
    assert "900.0 MiB at most; at the peak 120.0 MiB" in reserved
    assert answer(make_oom())[:2] == findings(make_oom())[:2]
