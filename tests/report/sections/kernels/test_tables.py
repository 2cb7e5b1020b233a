"""Tables over any number of profiled runs, made of hand-made profiles and records; one run is
one row for each part.
"""

from dataclasses import replace

import pytest

from cs336.analysis.kernels.phases import LaunchPhase
from cs336.analysis.kernels.step_profile import GroupTimes, StepSkew, write_profile
from cs336.config import Parallel, Phase, Precision, Profiler
from cs336.costs.communication import Collective
from cs336.record import Measurement
from cs336.report.formats import csv_of
from cs336.report.results import Results
from cs336.report.sections.kernels.communication import (
    MAX_SKEWS,
    communication,
    groups,
    ranks,
    skew,
)
from cs336.report.sections.kernels.entry import Explained, load_profiled
from cs336.report.sections.kernels.tables import attention, classes, phases, top_kernels
from cs336.sweep.store import explanation_path
from tests.report.making import make_config, make_failure, make_record
from tests.report.reading import column, csv_rows
from tests.report.sections.kernels.profiles import (
    BACKWARD,
    GEMM_A,
    UNATTRIBUTED,
    headings,
    make_cpu_profile,
    make_entry,
    make_phase,
    make_profile,
    make_ranks,
    make_shared,
    numbers,
)


def of_file(make, profile=None):
    """The section of a file about which nothing else is known."""
    return make([Explained(profile=profile or make_profile())])


# phases


def test_phases_by_hand():
    (table,) = of_file(phases).tables
    assert column(table, "phase") == ["forward", "backward", "optimizer", "step"]
    assert column(table, "kernels") == ["7", "8", "10", "25"]
    # forward 4.9 and 5.1: deviation sqrt(2) * 0.1; all 19.9 and 20.1
    assert column(table, "GPU time") == ["5.00 ± 0.14", "10.00 ± 0", "5.000 ± 0", "20.00 ± 0.14"]
    assert column(table, "share") == ["25.0", "50.0", "25.0", "100.0"]
    assert column(table, "wall") == ["8.000 ± 0", "12.00 ± 0", "6.0 ± 1.4", "26.0 ± 1.4"]
    # 10/16, 20.2/24, 10/12, 40.2/52
    assert column(table, "GPU busy") == ["62.5", "84.2", "83.3", "77.3"]
    assert column(table, "CPU") == ["7.000 ± 0", "11.00 ± 0", "4.000 ± 0", "22.00 ± 0"]
    # 14 ms in 14 launches, 22 ms in 16 and two copies, 8 ms in 20
    assert column(table, "CPU per launch") == ["1,000", "1,222", "400.0", "846.2"]
    assert column(table, "copies") == ["0", "1", "0", "1"]
    assert "recomputed" not in headings(table)
    assert any("The step by the host's clock: 26.0 ± 1.4 ms." in note for note in table.notes)
    section = of_file(phases)
    assert numbers(section, "kernel_std_ms") == pytest.approx([0.02**0.5, 0, 0, 0.02**0.5])
    assert numbers(section, "launch_calls_per_step") == [7, 9, 10, 26]
    assert numbers(section, "copy_mean_ms") == pytest.approx([0, 0.1, 0, 0.1])


def test_recomputed_and_unattributed_kernels_have_their_own_figures():
    whole = make_profile()
    forward, backward, optimizer = whole.phases
    changed = (
        forward,
        replace(backward, recomputed_s=(0.003, 0.005)),
        optimizer,
        make_phase(UNATTRIBUTED, (1, 2), (1, 1), (0.5, 0.5), (0, 0)),
    )
    (table,) = of_file(
        phases, replace(whole, phases=changed, num_kernels=80, kernel_s=0.0635)
    ).tables
    assert column(table, "recomputed") == ["0", "4.0 ± 1.4", "0", "0", "4.0 ± 1.4"]
    assert column(table, "kernels") == ["7", "8", "10", "1.50", "26.50"]
    assert column(table, "CPU per launch")[3] == ""  # no launch of its own


def test_a_cpu_has_operators_and_no_host_beside_it():
    (table,) = of_file(phases, make_cpu_profile()).tables
    assert headings(table) == ["phase", "operators", "CPU time", "share", "wall"]
    assert column(table, "CPU time") == ["10.00 ± 0", "16.00 ± 0", "4.000 ± 0", "30.00 ± 0"]
    (row, *_) = csv_rows(of_file(phases, make_cpu_profile()))
    assert {
        row[name]
        for name in ("busy_share", "host_mean_ms", "host_per_launch_ms", "launch_calls_per_step")
    } == {""}


def test_one_step_has_no_deviation():
    whole = make_profile()
    by_step = [
        "launches",
        "kernel_s",
        "busy_s",
        "wall_s",
        "host_s",
        "recomputed_s",
        "copies",
        "copy_s",
    ]
    phases_of_first = []
    for phase in whole.phases:
        of_first = {name: getattr(phase, name)[:1] for name in by_step}
        phases_of_first.append(replace(phase, **of_first))
    one = replace(
        whole,
        num_steps=1,
        phases=tuple(phases_of_first),
        step_s=(0.025,),
        num_kernels=52,
        kernel_s=0.0414,
    )
    (table,) = of_file(phases, one).tables
    assert column(table, "GPU time") == ["4.900", "10.00", "5.000", "19.90"]
    assert not any("±" in text for row in table.rows for text in row)
    assert csv_rows(of_file(phases, one))[0]["kernel_std_ms"] == ""


def test_phases_beside_the_clock_of_the_plain_run():
    """Forward: 8 ms wall, 5 ms of kernels; the plain step takes 25 ms, its forward 6.25."""
    section = phases([make_entry(), make_entry(precision=Precision.BF16, plain_s=None)])
    (forward,) = csv_rows(section, precision="fp32", phase="forward")
    assert float(forward["kernel_mean_ms"]) == pytest.approx(5)
    assert float(forward["clock_mean_ms"]) == pytest.approx(6.25)
    assert float(forward["wall_over_clock"]) == pytest.approx(8 / 6.25)
    (step,) = csv_rows(section, precision="fp32", phase="step")
    values = [float(step[name]) for name in ("clock_mean_ms", "profiled_mean_ms", "slowdown")]
    assert values == pytest.approx([25, 31, 31 / 25])
    (alone,) = csv_rows(section, precision="bf16", phase="step")
    assert (alone["clock_mean_ms"], alone["slowdown"]) == ("", "")
    (table,) = section.tables
    assert table.rows[0][:6] == ("small", "128", "fp32", "forward", "7", "5.00 ± 0.14")
    assert table.rows[0][-3:] == ("6.250", "+28.0", "1.24")
    (alone,) = phases([make_entry()]).tables
    assert headings(alone)[0] == "phase", "the notes say which configuration it is"
    assert any("small, ctx 128" in note for note in alone.notes)


def test_the_phases_of_a_cpu_say_nothing_of_a_gpu() -> None:
    (of_cpu,) = phases([make_entry(make_cpu_profile())]).tables
    (of_gpu,) = phases([make_entry()]).tables
    assert any("The clock ran without a profiler" in note for note in of_cpu.notes)
    assert not any("GPU" in note for note in of_cpu.notes)
    assert any("GPU busy" in note for note in of_gpu.notes)


def test_a_phase_that_launched_nothing_is_shown_where_it_is_long():
    """0.1 and 1 ms of 25 ms."""
    for time_ms, is_shown in ((0.1, False), (1, True)):
        data = make_phase(LaunchPhase.DATA, (0, 0), (0, 0), (time_ms, time_ms), (time_ms, time_ms))
        (table,) = of_file(phases, make_profile(phases=(data, *make_profile().phases))).tables
        assert ("data" in column(table, "phase")) is is_shown


# classes


def test_classes_by_hand():
    """Of 40 ms 22 are products, 11 element-wise, 3 softmax, 2 fills and 2 of a kernel that no
    rule knows.
    """
    section = of_file(classes)
    (table,) = section.tables
    assert column(table, "phase") == ["forward", "backward", "optimizer", "step"]
    assert column(table, "matrix product") == ["60.0", "80.0", "", "55.0"]
    assert column(table, "element-wise") == ["30.0", "", "80.0", "27.5"]
    assert column(table, "softmax") == ["10.0", "10.0", "", "7.5"]
    assert column(table, "other") == ["", "", "20.0", "5.0"]
    assert "communication" not in headings(table)
    assert numbers(section, "matrix_product_ms_per_step") == pytest.approx([3, 8, 0, 11])
    assert numbers(section, "matrix_product_per_step") == [4, 6, 0, 10]


def test_inside_attention_by_hand():
    """Forward: softmax 1 ms and products 3 ms of 5 ms, 0.15 and 6 GFLOP; backward: 2 and 8 of 10
    ms, 0.12 and 12.
    """
    section = of_file(attention)
    (table,) = section.tables
    assert column(table, "phase") == ["forward", "backward"]
    assert column(table, "scores") == ["1.250", "2.000"]
    assert column(table, "softmax") == ["0.5000", "1.000"]
    assert column(table, "values") == ["0.7500", "2.000"]
    assert column(table, "matmuls") == ["1.500", "4.000"]
    assert column(table, "of phase") == ["50.0", "50.0"]
    assert column(table, "time ratio") == ["0.333", "0.250"]
    assert column(table, "FLOP ratio") == ["0.0250", "0.0100"]
    assert column(table, "time per FLOP") == ["13.3", "25.0"]
    assert numbers(section, "scores_per_step") == [2, 2]
    # 3e9 in 2.5 ms, 6e9 in 4 ms
    assert numbers(section, "scores_flops_per_s") == pytest.approx([1.2e12, 1.5e12])
    assert numbers(section, "whole_ms_per_step") == pytest.approx([2.5, 5])


def test_attention_of_an_unknown_shape_has_no_flops():
    unknown = tuple(replace(row, flops=None) for row in make_profile().attention)
    section = of_file(attention, make_profile(attention=unknown))
    (table,) = section.tables
    assert "FLOP ratio" not in headings(table)
    assert column(table, "time ratio") == ["0.333", "0.250"]
    assert csv_rows(section)[0]["scores_flops_per_s"] == ""
    (table,) = of_file(attention, make_profile(attention=unknown[3:4])).tables
    assert "time ratio" not in headings(table)
    assert of_file(attention, make_profile(attention=())).tables == ()


def test_the_longest_kernels():
    """gemm_a 14 of 40 ms."""
    (step,) = csv_rows(top_kernels([make_entry()]), of="step")
    assert step["name"] == GEMM_A
    assert float(step["share"]) == pytest.approx(14 / 40)
    assert float(step["total_ms_per_step"]) == pytest.approx(7)
    assert float(step["count_per_step"]) == 8


# communication


def test_communication_by_hand() -> None:
    section = communication([Explained(profile=make_shared())])
    (table,) = section.tables
    gather, scatter = "all-gather", "reduce-scatter"
    of_kind = [gather, gather, scatter, "all", scatter, gather, scatter, "all"]
    assert column(table, "collective") == of_kind
    assert column(table, "phase") == [
        "forward",
        "backward",
        "backward",
        "backward",
        "communication",
        "step",
        "step",
        "step",
    ]
    assert numbers(section, "collectives_per_step") == [2, 1, 1, 2, 0.5, 3, 1.5, 4.5]
    assert numbers(section, "collective_mean_ms") == pytest.approx([2, 2, 4, 5, 2, 4, 6, 9])
    assert numbers(section, "exposed_mean_ms") == pytest.approx([1, 0, 2, 2, 2, 1, 4, 5])
    assert numbers(section, "overlapped_mean_ms") == pytest.approx([1, 2, 2, 3, 0, 3, 2, 4])
    # of forward 8 ms, backward 12, communication 2, and of the step 28
    shares = [1 / 8, 0, 2 / 12, 2 / 12, 2 / 2, 1 / 28, 4 / 28, 5 / 28]
    assert numbers(section, "exposed_share") == pytest.approx(shares)
    # the steps' sums differ: 10 and 8 ms, of which 6 and 4 are exposed
    (whole,) = csv_rows(section, phase="step", collective="all")
    assert [float(whole[f"{key}_std_ms"]) for key in ("collective", "exposed")] == pytest.approx(
        [2**0.5, 2**0.5]
    )


def test_without_collectives_or_other_ranks_there_is_no_table() -> None:
    for make in (communication, groups, ranks, skew):
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
    unknown = ranks([Explained(profile=make_shared(ranks=make_ranks(None, None)))])
    assert "waited" not in headings(unknown.tables[0])
    assert [row["waited_mean_ms"] for row in csv_rows(unknown)] == ["", ""]


@pytest.mark.parametrize("is_met", [True, False])
def test_a_process_group_by_hand(is_met: bool) -> None:
    """Two ranks of four in two steps: a collective in each, of 8 MB that take 40 us to send."""
    group = GroupTimes(
        group="mesh_dp",
        ranks="[0, 2, 4, 6]",
        size=4,
        here=2,
        collective=Collective.REDUCE_SCATTER,
        count=4,
        bytes=4 * 8_000_000,
        total_s=1e-3,
        exposed_s=5e-4,
        sent_s=160e-6,
        is_met=is_met,
    )
    section = of_file(groups, make_profile(groups=(group,), device_names=("NVIDIA H200",)))
    (table,) = section.tables
    assert column(table, "bytes of each") == ["8.000"]
    assert column(table, "times") == ["1"]
    assert (column(table, "time"), column(table, "exposed")) == (["0.2500"], ["0.1250"])
    more, less = ("", "") if is_met else ("≥ ", "≤ ")
    assert column(table, "sending") == [f"{less}0.04000"]
    assert (column(table, "algorithm"), column(table, "bus")) == ([f"{more}200"], [f"{more}150"])
    assert column(table, "NVLink") == ["450"]  # 900 GB/s in both directions, by the data sheet
    assert any("waiting" in note for note in table.notes) != is_met


def test_skews_name_the_rank_that_was_last_most_often() -> None:
    last = [(3, 0, 2), (1, 0, 2)]
    times = [
        replace(times, last=of_rank)
        for times, of_rank in zip(make_ranks((0, 0), (1, 3)), last, strict=True)
    ]
    skews = [
        StepSkew(collectives=count, median_s=1e-3, largest_s=0.25 * count) for count in (5, 4, 4)
    ]
    section = of_file(skew, make_shared(ranks=tuple(times), skew=tuple(skews)))
    (table,) = section.tables
    assert column(table, "began last most often") == ["rank 0, 3 of 5", "", "2 ranks, 2 of 4"]
    assert numbers(section, "largest_ms") == [1250, 1000, 1000]
    many = tuple(skews[:1] * (MAX_SKEWS + 5))
    assert len(of_file(skew, make_shared(skew=many)).tables[0].rows) == MAX_SKEWS
    assert len(csv_rows(of_file(skew, make_shared(skew=many)))) == MAX_SKEWS + 5


def test_results_have_what_the_profiles_of_their_configurations_tell() -> None:
    """Of two ranks, 9 ms of collectives in each, of which 5 are exposed and, on the other rank,
    2.
    """
    one, other = make_ranks((0, 0), (1, 3))
    hidden = tuple(
        replace(row, exposed_s=(0.001, 0.001))
        for row in other.communication
        if row.phase is not BACKWARD
    )
    late = tuple(
        replace(row, exposed_s=(0.0, 0.0)) for row in other.communication if row.phase is BACKWARD
    )
    profile = make_shared(ranks=(one, replace(other, communication=(*hidden, *late))))
    entry = make_entry(profile, parallel=Parallel.FSDP, ranks=2)
    alone = make_record(make_config("tiny"), (0.1, 0.1))
    results = Results(records=[entry.plain, entry.profiled, alone], kernels=[entry])
    values = {row["size"]: row for row in results.steps.rows}
    assert values["small"]["collective_mean_ms"] == pytest.approx(9)
    assert values["small"]["exposed_mean_ms"] == pytest.approx(3.5)
    assert values["small"]["exposed_share"] == pytest.approx((5 / 28 + 2 / 28) / 2)
    assert values["tiny"]["exposed_mean_ms"] is None
    assert "exposed_share" not in Results(records=[alone]).steps.rows[0]


@pytest.mark.parametrize(("profile", "clock_ms"), [(make_profile(), "14"), (make_shared(), "10")])
def test_the_clock_of_backward_has_communication_where_the_trace_cannot_tell_them_apart(
    profile, clock_ms
) -> None:
    entry = make_entry(profile, parallel=Parallel.DDP_FLAT, ranks=2)
    measured = (Measurement(Phase.BACKWARD, (0.010,)), Measurement(Phase.COMMUNICATION, (0.004,)))
    section = phases([replace(entry, plain=replace(entry.plain, measurements=measured))])
    assert [row["clock_mean_ms"] for row in csv_rows(section, phase="backward")] == [clock_ms]


# runs with their profiles


def test_profiles_are_loaded_with_their_plain_runs(tmp_path, capsys):
    """Of five records two are plain, one was profiled for memory and one profile is missing, one
    unreadable.
    """
    kernel = make_config(profiler=Profiler.NSYS)
    missing, broken = (
        make_config(profiler=Profiler.NSYS, precision=kind)
        for kind in (Precision.BF16, Precision.TF32)
    )
    other_device = make_record(kernel.unprofiled, (0.5,), device_name="NVIDIA A100-SXM4-80GB")
    plain = make_record(kernel.unprofiled, (0.02,))
    records = [
        other_device,
        plain,
        make_record(kernel, (0.03,)),
        make_failure(missing),
        make_record(broken, (0.03,)),
        make_record(make_config(profiler=Profiler.MEMORY), (0.03,)),
    ]
    runs = tmp_path / "runs"
    explanation_path(kernel, runs).parent.mkdir()
    write_profile(make_profile(), explanation_path(kernel, runs))
    explanation_path(broken, runs).write_bytes(b"{")
    (found,) = load_profiled(records, tmp_path)
    assert (found.config, found.profile, found.plain, found.profiled) == (
        kernel,
        make_profile(),
        plain,
        records[2],
    )
    assert found.clock_s(Phase.FORWARD, found.plain) == pytest.approx(0.005)
    # the first in the order of tables: tf32 before bf16
    (said,) = capsys.readouterr().err.splitlines()
    assert all(word in said for word in ("(and 1 more)", "tf32", "not a step profile"))
