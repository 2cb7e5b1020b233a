"""Tables and findings of communication, made of hand-made profiles; all times are milliseconds over both steps."""

from dataclasses import replace

import pytest

from cs336_systems.analysis.kernels.step_profile import StepProfile
from cs336_systems.config import Parallel, Phase, RunConfig
from cs336_systems.record import Measurement
from cs336_systems.report.formats import csv_of
from cs336_systems.report.results import Results
from cs336_systems.report.sections.kernels.communication import communication, ranks
from cs336_systems.report.sections.kernels.entries import Explained
from cs336_systems.report.sections.kernels.findings import findings
from cs336_systems.report.sections.kernels.tables import phases
from tests.report.making import make_config, make_record
from tests.report.reading import column, csv_rows
from tests.report.sections.kernels.profiles import (
    BACKWARD,
    FORWARD,
    headings,
    make_entry,
    make_gather,
    make_phase,
    make_profile,
    make_ranks,
    make_shared,
    make_times,
    numbers,
)


def test_communication_by_hand() -> None:
    section = communication([Explained(profile=make_shared())])
    (table,) = section.tables
    gather, scatter = "all-gather", "reduce-scatter"
    of_kind = [gather, gather, scatter, "all", scatter, gather, scatter, "all"]
    assert column(table, "collective") == of_kind
    assert column(table, "phase") == [
        "forward", "backward", "backward", "backward", "communication", "step", "step", "step"
    ]  # fmt: skip
    assert numbers(section, "collectives_per_step") == [2, 1, 1, 2, 0.5, 3, 1.5, 4.5]
    assert numbers(section, "collective_mean_ms") == pytest.approx([2, 2, 4, 5, 2, 4, 6, 9])
    assert numbers(section, "exposed_mean_ms") == pytest.approx([1, 0, 2, 2, 2, 1, 4, 5])
    assert numbers(section, "overlapped_mean_ms") == pytest.approx([1, 2, 2, 3, 0, 3, 2, 4])
    # of forward 8 ms, backward 12, communication 2, and of the step 28
    shares = [1 / 8, 0, 2 / 12, 2 / 12, 2 / 2, 1 / 28, 4 / 28, 5 / 28]
    assert numbers(section, "exposed_share") == pytest.approx(shares)
    # the steps' sums differ: 10 and 8 ms, of which 6 and 4 are exposed
    (whole,) = csv_rows(section, phase="step", collective="all")
    assert [float(whole[f"{key}_std_ms"]) for key in ("collective", "exposed")] == pytest.approx([2**0.5, 2**0.5])


def test_without_collectives_or_other_ranks_there_is_no_table() -> None:
    for make in (communication, ranks):
        section = make([Explained(profile=make_profile())])
        assert (section.tables, csv_of(section)) == ((), "")


def test_ranks_beside_each_other_by_hand() -> None:
    section = ranks([Explained(profile=make_shared(ranks=make_ranks((0, 0), (1, 3))))])
    (table,) = section.tables
    assert column(table, "rank") == ["0", "1"]
    assert numbers(section, "forward_wall_mean_ms") == [8, 8]
    assert numbers(section, "step_wall_mean_ms") == [28, 28]
    assert numbers(section, "exposed_mean_ms") == pytest.approx([5, 5])
    assert numbers(section, "waited_mean_ms") == pytest.approx([0, 2])
    assert any("0 in 2" in note for note in table.notes)
    unknown = ranks([Explained(profile=make_shared(ranks=make_ranks(None, None)))])
    assert "waited" not in headings(unknown.tables[0])
    assert [row["waited_mean_ms"] for row in csv_rows(unknown)] == ["", ""]


def told(profile: StepProfile, config: RunConfig | None = None) -> str:
    (text,) = [text for text in findings(profile, config) if "Communication" in text]
    return text


def test_exposed_communication_is_told_with_its_phases_and_what_hides_it() -> None:
    text = told(make_shared())
    assert text.startswith("Communication takes 9.00 ms, and for 5.00 ms of that, 17.9 % of the step,")
    assert text.endswith("2.00 ms in backward, 2.00 ms in communication, 1.00 ms in forward.")

    def config(way: Parallel) -> RunConfig:
        return make_config("small", parallel=way, ranks=2)

    def proposed(way: Parallel) -> str:
        return " ".join(text for text in findings(make_shared(), config(way)) if text.startswith("What may"))

    assert "--parallel ddp-overlap" in proposed(Parallel.DDP_FLAT)
    assert "--parallel" not in proposed(Parallel.DDP_OVERLAP)
    assert "a larger --batch-size" in proposed(Parallel.DDP_OVERLAP)


def test_a_rank_for_which_the_others_wait_is_named_if_it_is_always_the_same() -> None:
    text = told(make_shared(ranks=make_ranks((0, 0), (1, 3))))
    assert "rank 0 for 0.00 ms and rank 1 for 2.00 ms" in text
    assert "wait for rank 0 in 2 of 2 steps" in text
    assert "in 2 of 2 steps" not in told(make_shared(ranks=make_ranks((0, 3), (1, 0))))
    assert "rank" not in told(make_shared(ranks=make_ranks((0, 0), (0.1, 0.1))))  # 2 % of the exposed time


def test_communication_that_runs_beside_other_kernels_is_told_as_such() -> None:
    hidden = tuple(
        replace(row, exposed_s=(0.0, 0.0005)) for row in make_shared().communication if row.phase is BACKWARD
    )
    assert told(replace(make_shared(), communication=hidden)).startswith(
        "Communication takes 5.00 ms, all but 0.250 ms of it"
    )


def test_gathers_by_hand() -> None:
    made = (
        make_gather("embedding", FORWARD, (1, 1), (-0.5, -0.1), (0.5, 0.1)),
        make_gather("layers.0", FORWARD, (2, 2), (1, 3), (0, 0)),
        make_gather("layers.0", BACKWARD, (2, 0), (-4, None), (3, 0)),
    )
    section = communication([Explained(profile=make_profile(gathers=made))])
    _, by_phase, late = section.tables
    assert [column(by_phase, name) for name in ("phase", "gathers", "late")] == [
        ["forward", "backward"], ["2", "0.50"], ["1", "0.50"]
    ]  # fmt: skip
    assert column(by_phase, "waited") == ["0.3000", "1.500"]
    assert list(zip(column(late, "gathered"), column(late, "phase"), column(late, "late in"), strict=True)) == [
        ("embedding", "forward", "2"), ("layers.0", "backward", "1")
    ]  # fmt: skip
    assert column(late, "ahead") == ["-0.3000", "-4.000"]
    assert numbers(section, "gather_waited_ms", collective="all") == pytest.approx([0.3, 1.5])


def test_results_have_what_the_profiles_of_their_configurations_tell() -> None:
    """Of two ranks, 9 ms of collectives in each, of which 5 are exposed and, on the other rank, 2."""
    one, other = make_ranks((0, 0), (1, 3))
    hidden = tuple(replace(row, exposed_s=(0.001, 0.001)) for row in other.communication if row.phase is not BACKWARD)
    late = tuple(replace(row, exposed_s=(0.0, 0.0)) for row in other.communication if row.phase is BACKWARD)
    profile = make_shared(ranks=(one, replace(other, communication=(*hidden, *late))))
    entry = make_entry(profile, parallel=Parallel.FSDP, ranks=2)
    alone = make_record(make_config("tiny"), (0.1, 0.1))
    results = Results(records=[entry.plain, entry.profiled, alone], kernels=[entry])
    values = {row["size"]: row for row in results.json()["results"]}
    assert values["small"]["collective_mean_s"] == pytest.approx(0.009)
    assert values["small"]["exposed_mean_s"] == pytest.approx(0.0035)
    assert values["small"]["exposed_share"] == pytest.approx((5 / 28 + 2 / 28) / 2)
    assert values["tiny"]["exposed_mean_s"] is None
    assert "exposed_share" not in Results(records=[alone]).json()["results"][0]


@pytest.mark.parametrize(("profile", "clock_ms"), [(make_profile(), "14"), (make_shared(), "10")])
def test_the_clock_of_backward_has_communication_where_the_trace_cannot_tell_them_apart(profile, clock_ms) -> None:
    entry = make_entry(profile, parallel=Parallel.DDP_FLAT, ranks=2)
    measured = (Measurement(Phase.BACKWARD, (0.010,)), Measurement(Phase.COMMUNICATION, (0.004,)))
    section = phases([replace(entry, plain=replace(entry.plain, measurements=measured))])
    assert [row["clock_mean_ms"] for row in csv_rows(section, phase="backward")] == [clock_ms]


@pytest.mark.parametrize(
    ("kernel_ms", "exposed_ms", "limit"),
    [(9, 0.5, "The GPU is the limit"), (9, 5, "Communication is a limit"), (5, 0.5, "Copies limit the GPU: 4.00 ms")],
)
def test_a_gpu_that_waits_in_collectives_or_copies_is_busy_and_not_the_limit(kernel_ms, exposed_ms, limit) -> None:
    """Busy for 9 of the 10 ms of a phase, without idle times that another cause would explain."""
    kernels = (kernel_ms, kernel_ms)
    phase = make_phase(BACKWARD, (8, 8), kernels, (10, 10), (9, 9), busy_s=(9e-3, 9e-3))
    sent = make_times(BACKWARD, None, (1, 1), (6, 6), (exposed_ms, exposed_ms))
    profile = make_profile(phases=(phase,), communication=(sent,), idle=())
    assert findings(profile)[0].startswith(limit)
