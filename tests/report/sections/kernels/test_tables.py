import csv
import io
import json
import random
import re
from dataclasses import replace

import pytest

from cs336_systems.analysis.kernels.phases import LaunchPhase
from cs336_systems.analysis.kernels.step_profile import IdleCause, StepProfile, decode_profile, encode_profile
from cs336_systems.report.formats import WRITERS
from cs336_systems.report.numbers import MAX_LABEL, label
from cs336_systems.report.sections.kernels import files as kernel_files
from cs336_systems.report.sections.kernels.files import profile_tables, sections, write_profile
from cs336_systems.report.sections.kernels.places import (
    MAX_MODULES,
    blocks_section,
    collapsed,
    gaps_section,
    host_calls_section,
    idle_section,
    modules_section,
)
from cs336_systems.report.sections.kernels.shares import (
    MAX_OTHERS,
    attention_section,
    classes_section,
    products_section,
)
from cs336_systems.report.sections.kernels.tables import kernels_section, phases_section
from cs336_systems.report.sections.kernels.words import about
from tests.report.making import HOSTILE
from tests.report.sections.kernels.profiles import (
    BACKWARD,
    FORWARD,
    GEMM_A,
    GEMM_B,
    NAMES,
    UNATTRIBUTED,
    make_attention,
    make_cpu_profile,
    make_inference,
    make_kernel,
    make_module,
    make_phase,
    make_products,
    make_profile,
)

pytestmark = pytest.mark.usefixtures("no_pictures")

ALL_PROFILES = (make_profile, make_inference, make_cpu_profile)


def column(table, name, number=0):
    """Cells below the heading of this name, or of the one so many after it that is called the same."""
    found = [index for index, heading in enumerate(table.headings) if heading.name == name]
    return [row[found[number]] for row in table.rows]


def rows(section):
    return list(csv.DictReader(io.StringIO(section.csv, newline="")))


def numbers(section, name, **chosen):
    return [float(row[name]) for row in rows(section) if all(row[key] == value for key, value in chosen.items())]


def headings(table):
    return {heading.name for heading in table.headings}


# phases


def test_phases_by_hand():
    (table,) = phases_section(make_profile()).tables
    assert column(table, "phase") == ["forward", "backward", "optimizer", "step"]
    assert column(table, "kernels") == ["7", "8", "10", "25"]
    # forward 4.9 and 5.1: deviation sqrt(2) * 0.1; all 19.9 and 20.1
    assert column(table, "GPU time") == ["5.00 ± 0.14", "10.00 ± 0", "5.000 ± 0", "20.00 ± 0.14"]
    assert column(table, "share") == ["25.0", "50.0", "25.0", "100.0"]
    assert column(table, "wall") == ["8.000 ± 0", "12.00 ± 0", "6.0 ± 1.4", "26.0 ± 1.4"]
    assert column(table, "GPU busy") == ["62.5", "84.2", "83.3", "77.3"]  # 10/16, 20.2/24, 10/12, 40.2/52
    assert column(table, "CPU") == ["7.000 ± 0", "11.00 ± 0", "4.000 ± 0", "22.00 ± 0"]
    # 14 ms in 14 launches, 22 ms in 16 and two copies, 8 ms in 20
    assert column(table, "CPU per launch") == ["1,000", "1,222", "400.0", "846.2"]
    assert column(table, "copies") == ["0", "1", "0", "1"]
    assert "recomputed" not in headings(table)
    assert any("The step by the host's clock: 26.0 ± 1.4 ms." in note for note in table.notes)


def test_phases_csv_by_hand():
    section = phases_section(make_profile())
    assert numbers(section, "kernels_per_step") == [7, 8, 10, 25]
    assert numbers(section, "kernel_mean_ms") == [5, 10, 5, 20]
    assert numbers(section, "kernel_std_ms") == pytest.approx([0.02**0.5, 0, 0, 0.02**0.5])
    assert numbers(section, "busy_share") == pytest.approx([10 / 16, 20.2 / 24, 10 / 12, 40.2 / 52])
    assert numbers(section, "launch_calls_per_step") == [7, 9, 10, 26]
    assert numbers(section, "host_per_launch_ms") == pytest.approx([1, 22 / 18, 0.4, 44 / 52])
    assert numbers(section, "copy_mean_ms") == pytest.approx([0, 0.1, 0, 0.1])
    assert numbers(section, "recomputed_mean_ms") == [0, 0, 0, 0]


def test_every_kernel_of_the_file_is_accounted_for():
    (table,) = phases_section(make_profile()).tables
    assert (
        "Check: forward 14 + backward 16 + optimizer 20 + unattributed 0 + warm-up 25 + outside of steps 1 "
        "+ without a launch 1 = all 77 kernels of the file, 61.50 ms."
    ) in table.notes


def test_recomputed_and_unattributed_kernels_have_their_own_figures():
    whole = make_profile()
    forward, backward, optimizer = whole.phases
    phases = (forward, replace(backward, recomputed_s=(0.003, 0.005)), optimizer,
              make_phase(UNATTRIBUTED, (1, 2), (1, 1), (0.5, 0.5), (0, 0)))  # fmt: skip
    (table,) = phases_section(replace(whole, phases=phases, num_kernels=80, kernel_s=0.0635)).tables
    assert column(table, "recomputed") == ["0", "4.0 ± 1.4", "0", "0", "4.0 ± 1.4"]
    assert column(table, "kernels") == ["7", "8", "10", "1.50", "26.50"]
    assert column(table, "CPU per launch")[3] == ""  # no launch of its own
    assert any("optimizer 20 + unattributed 3 + warm-up 25" in note for note in table.notes)


def test_a_cpu_has_operators_and_no_host_beside_it():
    (table,) = phases_section(make_cpu_profile()).tables
    assert [heading.name for heading in table.headings] == ["phase", "operators", "CPU time", "share", "wall"]
    assert column(table, "CPU time") == ["10.00 ± 0", "16.00 ± 0", "4.000 ± 0", "30.00 ± 0"]
    assert any("= all 58 operators of the file, 60.00 ms." in note for note in table.notes)
    (row, *_) = rows(phases_section(make_cpu_profile()))
    assert {row[name] for name in ("busy_share", "host_mean_ms", "host_per_launch_ms", "launch_calls_per_step")} == {""}
    tables = [table for section in sections(make_cpu_profile(), 10) for table in section.tables]
    texts = [write(table) for table in tables for write in WRITERS.values()]
    assert not any(word in text for text in texts for word in ("kernel", "GPU", "launch"))


def test_one_step_has_no_deviation():
    whole = make_profile()
    phases = tuple(
        replace(phase, **{name: getattr(phase, name)[:1] for name in (
            "launches", "kernel_s", "busy_s", "wall_s", "host_s", "recomputed_s", "copies", "copy_s")})
        for phase in whole.phases
    )  # fmt: skip
    one = replace(whole, num_steps=1, phases=phases, step_s=(0.025,), num_kernels=52, kernel_s=0.0414)
    (table,) = phases_section(one).tables
    assert column(table, "GPU time") == ["4.900", "10.00", "5.000", "19.90"]
    assert not any("±" in text for row in table.rows for text in row)
    assert rows(phases_section(one))[0]["kernel_std_ms"] == ""


@pytest.mark.parametrize(
    ("change", "text"),
    [({}, "small.nsys-rep, NVIDIA H200, 2 steps."),
     ({"is_warmup": True}, "small.nsys-rep, NVIDIA H200, 2 warm-up steps."),
     ({"is_whole_trace": True, "device_names": ()},
      "small.nsys-rep, no steps in the file, so the whole of it counts as one.")],
)  # fmt: skip
def test_what_the_tables_are_of(change, text):
    assert about(make_profile(**change)) == text


# kernels


def test_top_kernels_by_hand():
    whole, forward, backward, optimizer = kernels_section(make_profile(), 2).tables
    assert column(whole, "kernel") == [GEMM_A, "vectorized_elementwise_kernel<mul>"]
    assert column(whole, "share") == ["35.0", "27.5"]  # 14 and 11 of 40 ms
    assert column(whole, "total") == ["7.000", "5.500"]
    assert column(whole, "count") == ["8", "10"]
    # 14 ms in 16 launches
    assert [column(whole, name)[0] for name in ("mean", "median", "min", "max", "std")] == [
        "875.0", "787.5", "437.5", "1,750", "87.50"
    ]  # fmt: skip
    assert column(whole, "class") == ["matrix product", "element-wise"]
    assert "Shown are 2 of 7 different kernels, 62.5 % of the time." in whole.notes
    assert column(forward, "total") == ["3.000", "1.500"]
    assert column(backward, "share") == ["40.0", "40.0"]  # of backward's 20 ms
    assert column(optimizer, "count") == ["8", "2"]
    assert [table.title for table in (whole, forward)] == [
        "Kernels of a whole step, by GPU time", "Kernels of forward, by GPU time"
    ]  # fmt: skip


def test_a_single_launch_has_no_deviation_and_a_count_may_be_a_fraction():
    kernels = (make_kernel(GEMM_A, 1, 3.0, stdev_s=None), make_kernel(GEMM_B, 3, 1.0))
    (table,) = kernels_section(make_profile(kernels=kernels), 10).tables
    assert column(table, "std") == ["", "33.33"]
    assert column(table, "count") == ["0.50", "1.50"]
    assert "Shown are" not in " ".join(table.notes)


def test_kernels_csv_has_all_with_their_whole_names():
    section = kernels_section(make_profile(), 1)
    assert len(rows(section)) == 7 + 3 + 4 + 2
    assert {row["name"] for row in rows(section)} == {name for found in NAMES.values() for name, *_ in found}
    for phase in ("step", "forward", "backward", "optimizer"):
        assert sum(numbers(section, "share", phase=phase)) == pytest.approx(1)
    assert sum(numbers(section, "total_ms_per_step", phase="step")) == pytest.approx(20)
    cutlass = [row for row in rows(section) if row["name"] == GEMM_B]
    assert [(row["phase"], row["count"], row["mean_ms"]) for row in cutlass] == [
        ("step", "4", "2"), ("backward", "4", "2")
    ]  # fmt: skip


def test_a_label_keeps_the_start_and_the_end():
    assert label("x" * MAX_LABEL) == "x" * MAX_LABEL
    long = label("start" + "x" * 8000 + "end")
    assert (len(long), long[:6], long[-4:]) == (MAX_LABEL, "startx", "xend")
    assert long.count("…") == 1


# classes


def test_classes_by_hand():
    (table,) = classes_section(make_profile()).tables
    # 22, 11, 3, 2 and 2 ms of 40
    assert column(table, "class")[:3] == ["matrix product", "element-wise", "softmax"]
    assert sorted(column(table, "class")[3:]) == ["copy and fill", "other", "sum"]
    assert column(table, "forward") == ["3.000", "1.500", "0.5000", "", "", "5.000"]
    assert column(table, "", 0) == ["60.0", "30.0", "10.0", "", "", "100.0"]
    assert column(table, "step") == ["11.00", "5.500", "1.500", "1.000", "1.000", "20.00"]
    assert column(table, "", 3) == ["55.0", "27.5", "7.5", "5.0", "5.0", "100.0"]
    assert dict(zip(column(table, "class"), column(table, "kernels"), strict=True)) == {
        "matrix product": "10", "element-wise": "10", "softmax": "2", "copy and fill": "1", "other": "2", "sum": "25"
    }  # fmt: skip
    assert "Class other, kernels that no rule knows: mystery_of_mine (1.000 ms)." in table.notes


@pytest.mark.parametrize("make", ALL_PROFILES)
def test_class_shares_add_up(make):
    section = classes_section(make())
    for phase in {row["phase"] for row in rows(section)}:
        of_phase = [row for row in rows(section) if row["phase"] == phase]
        (total,) = [row for row in of_phase if row["class"] == "sum"]
        assert float(total["share"]) == 1
        for name in ("share", "total_ms_per_step", "count_per_step"):
            parts = [float(row[name]) for row in of_phase if row["class"] != "sum"]
            assert sum(parts) == pytest.approx(float(total[name]))


def test_a_phase_without_kernels_has_no_column_and_many_unknown_kernels_are_counted():
    whole = make_inference()
    kernels = tuple(make_kernel(f"unheard_{i}", 2, 2.0) for i in range(MAX_OTHERS + 3))
    profile = replace(whole, kernels=kernels, phases=(make_phase(LaunchPhase.DATA, (0, 0), (0, 0), (1, 1), (1, 1)),
                                                      *whole.phases))  # fmt: skip
    (table,) = classes_section(profile).tables
    assert [name for name in ("data", "forward", "backward") if name in headings(table)] == ["forward"]
    assert table.notes[-1].endswith(f"unheard_{MAX_OTHERS - 1} (1.000 ms), 3 more (3.000 ms).")


# products and attention


def test_products_by_hand():
    section = products_section(make_profile())
    (table,) = section.tables
    assert column(table, "phase") == ["forward", "backward"]
    assert column(table, "linear") == ["2", "2"]
    assert column(table, "linear time") == ["1.500", "4.000"]
    assert column(table, "attention") == ["2", "4"]
    assert column(table, "attention time") == ["1.500", "4.000"]
    assert "unknown" not in headings(table)
    assert numbers(section, "unknown_per_step") == [0, 0]
    assert numbers(section, "attention_ms_per_step") == [1.5, 4]


def test_products_that_cannot_be_told_are_said_to_be_so():
    (table,) = products_section(make_cpu_profile()).tables
    assert [heading.name for heading in table.headings] == ["phase", "unknown", "unknown time"]
    assert column(table, "unknown") == ["3", "6"]
    assert any(note.startswith("Unknown: the file does not tell") for note in table.notes)
    assert products_section(make_profile(products=(make_products(FORWARD, 0, 0),))).tables == ()


def test_inside_attention_by_hand():
    forward, backward = attention_section(make_profile()).tables
    assert column(forward, "part") == ["scores", "softmax", "values"]
    assert column(forward, "kernels") == ["2", "1", "1"]
    assert column(forward, "time") == ["1.250", "0.5000", "0.7500"]
    assert column(forward, "share") == ["50.0", "20.0", "30.0"]
    assert column(forward, "of forward") == ["25.0", "10.0", "15.0"]
    assert column(forward, "products") == ["0.7500", "", "0.7500"]
    assert column(forward, "FLOPs") == ["1.500", "0.07500", "1.500"]
    assert column(forward, "rate") == ["1.20", "0.150", "2.00"]  # 3e9 in 2.5 ms, 0.15e9 in 1 ms, 3e9 in 1.5 ms
    # 1 ms against 3 ms, 0.15 against 6 GFLOP
    sentence = "Softmax takes 0.333 of the time of the matrix products for 0.0250 of their FLOPs: 13.3 times as long"
    assert f"{sentence} per FLOP." in forward.notes
    # 2 ms against 8 ms, 0.12 against 12 GFLOP
    sentence = "Softmax takes 0.250 of the time of the matrix products for 0.0100 of their FLOPs: 25.0 times as long"
    assert f"{sentence} per FLOP." in backward.notes


def test_attention_csv_has_what_the_tables_have():
    section = attention_section(make_profile())
    assert numbers(section, "total_ms_per_step", phase="backward") == [2, 1, 2]
    assert numbers(section, "share_of_phase", phase="backward") == [0.2, 0.1, 0.2]
    assert numbers(section, "flops_per_s", part="scores") == pytest.approx([1.2e12, 1.5e12])


def test_attention_of_an_unknown_shape_has_no_flops():
    unknown = tuple(replace(row, flops=None) for row in make_profile().attention)
    forward, _ = attention_section(make_profile(attention=unknown)).tables
    assert not {"FLOPs", "rate"} & headings(forward)
    assert forward.notes[-1].startswith("Softmax takes 0.333 of the time of the matrix products; the FLOPs are not")
    products = (make_attention("scores", BACKWARD, 4, 4, 4, 4, None),)
    (alone,) = attention_section(make_profile(attention=products)).tables
    assert not any("Softmax" in note for note in alone.notes)


# modules and blocks


def test_modules_by_hand():
    (table,) = modules_section(make_profile()).tables
    found = {row[0]: row[1:] for row in table.rows}
    # forward, backward, optimizer, share, kernels
    assert found["outside of all ranges"] == ("", "1.000", "5.000", "30.0", "11")
    assert found["block.* > ffn"] == ("1.500", "4.000", "", "27.5", "4")
    assert found["block.* > attention"] == ("", "5.000", "", "25.0", "5")
    assert found["block.* > attention > attention.scores"] == ("1.250", "", "", "6.2", "2")
    section = modules_section(make_profile())
    assert sum(numbers(section, "share")) == pytest.approx(1)
    assert sum(numbers(section, "total_ms_per_step")) == pytest.approx(20)
    assert numbers(section, "share", module="block.* > attention > attention.values") == [0.0375]
    assert numbers(section, "count_per_step", module="block.* > ffn", phase="forward") == [2]


@pytest.mark.parametrize(
    ("name", "star"),
    [("block.31", "block.*"), ("layers.3", "layers.*"), ("TransformerBlock_3", "TransformerBlock_*"), ("h.11", "h.*"),
     ("Layer 2", "Layer *"), ("fc1", "fc1"), ("ln_2", "ln_2"), ("block", "block"), ("block.3.ffn", "block.3.ffn")],
)  # fmt: skip
def test_only_numbers_of_blocks_become_stars(name, star):
    assert collapsed(("model", name, "ffn")) == ("model", star, "ffn")


def test_blocks_by_hand():
    section = blocks_section(make_profile())
    (table,) = section.tables
    # forward: block 0 has 2.5 + 1.5 + 1 + 1 = 6 ms, block 1 has 4; backward: 13 and 5
    assert column(table, "phase") == ["forward", "backward"]
    assert column(table, "blocks") == ["2", "2"]
    assert column(table, "min") == ["2.000", "2.500"]
    assert column(table, "median") == ["2.500", "4.500"]
    assert column(table, "max") == ["3.000", "6.500"]
    assert column(table, "longest") == ["block.0", "block.0"]
    assert numbers(section, "total_ms_per_step", module="block.0") == [6.5, 3]
    assert numbers(section, "total_ms_per_step", module="block.1", phase="forward") == [2]


def test_a_block_holds_what_backward_computes_again():
    modules = (
        make_module(("block.1", "ffn"), BACKWARD, 2, 4),
        make_module(("forward", "block.1", "ffn"), BACKWARD, 2, 1),
    )
    (table,) = blocks_section(make_profile(modules=modules)).tables
    assert (column(table, "blocks"), column(table, "max")) == (["1"], ["2.500"])


def test_blocks_come_in_the_order_of_their_numbers():
    modules = [make_module(("model", f"block.{i}", "ffn"), FORWARD, 2, 1) for i in range(12)]
    random.Random(0).shuffle(modules)
    section = blocks_section(make_profile(modules=tuple(modules)))
    assert [row["module"] for row in rows(section)] == [f"model > block.{i}" for i in range(12)]


def test_many_modules_are_cut_to_read_and_kept_as_csv():
    modules = tuple(make_module((f"part_{chr(97 + i)}",), FORWARD, 2, 1) for i in range(MAX_MODULES + 5))
    section = modules_section(make_profile(modules=modules))
    (table,) = section.tables
    assert len(table.rows) == MAX_MODULES
    assert table.notes[-1] == "Shown are 20 of 25 modules, 80.0 % of the time."
    assert len(rows(section)) == 25
    assert blocks_section(make_profile(modules=modules)).tables == ()


# idle times and the host


def test_idle_times_by_hand():
    section = idle_section(make_profile(), 3)
    table, gaps = section.tables
    assert column(table, "phase")[:2] == ["forward", "backward"]
    assert column(table, "cause")[:2] == ["late launch", "host waited"]
    assert column(table, "idle") == ["2.500", "1.500", "0.7500", "0.5000", "0.4000", "0.2500", "5.900"]
    assert column(table, "of wall") == ["9.6", "5.8", "2.9", "1.9", "1.5", "1.0", "22.7"]  # of 52 ms
    assert column(table, "times") == ["5", "1", "2", "0.50", "4", "1", "13.50"]
    assert column(table, "each") == ["500.0", "1,500", "375.0", "1,000", "100.0", "250.0", "437.0"]
    # what is not busy is idle
    assert sum(numbers(section, "share_of_wall")) == pytest.approx(1 - 40.2 / 52)
    assert column(gaps, "idle") == ["1.600", "1.400", "1.000"]
    assert column(gaps, "at") == ["14.00", "14.00", "3.000"]
    assert column(gaps, "module") == ["block.0 > ffn", "outside of all ranges", "block.1 > ffn"]
    assert column(gaps, "host was in") == ["cudaStreamSynchronize", "cudaStreamSynchronize", "no CUDA call"]


def test_gaps_at_the_ends_of_a_step_are_named():
    whole = make_profile()
    gaps = (replace(whole.gaps[0], before="", start_s=0.0), whole.gaps[3])
    _, table = idle_section(replace(whole, gaps=gaps), 10).tables
    assert column(table, "before it")[0] == "start of the step"
    assert column(table, "after it")[1] == "end of the step"
    assert column(table, "at") == ["0", "24.75"]
    section = gaps_section(whole)
    assert numbers(section, "idle_ms") == [1.6, 1.4, 1, 0.25]
    assert rows(section)[3]["cause"] == IdleCause.END_OF_STEP
    assert rows(section)[3]["after"] == ""


def test_host_calls_by_hand():
    section = host_calls_section(make_profile())
    (table,) = section.tables
    assert column(table, "phase") == ["forward", "backward", "optimizer", "unattributed"]
    # a copy that waits counts as a wait
    assert column(table, "launches") == ["7", "8", "10", "0"]
    assert column(table, "time", 0) == ["0.03500", "0.04000", "0.05000", "0"]
    assert column(table, "each", 0) == ["5.000", "5.000", "5.000", ""]
    assert column(table, "waits") == ["0", "2", "0", "1"]
    assert column(table, "time", 1) == ["0", "1.510", "0", "0.5000"]
    assert column(table, "each", 1) == ["", "755.0", "", "500.0"]
    assert len(rows(section)) == 7
    assert rows(section)[-1] == {
        "phase": "forward", "function": "cudaGetDevice", "is_launch": "False", "is_wait": "False",
        "count_per_step": "2", "total_ms_per_step": "0.001", "mean_ms": "0.0005",
    }  # fmt: skip


# all of it


def test_findings_are_numbered_in_their_order(monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_files, "findings", lambda profile, config: ("first", "second"))
    table = profile_tables(make_profile(), 3)[0]
    assert (table.title, table.rows) == ("Findings", (("1", "first"), ("2", "second")))
    monkeypatch.setattr(kernel_files, "findings", lambda profile, config: ())
    assert profile_tables(make_profile(), 3)[0].title == "Phases of a step"
    assert "Nothing stands out." in write_profile(make_profile(), tmp_path)[1].read_text()


def test_a_file_without_calls_of_the_host_leaves_their_columns_empty():
    profile = make_profile(host_calls=(), idle=(), gaps=())
    assert rows(phases_section(profile))[0]["launch_calls_per_step"] == ""
    (table,) = phases_section(profile).tables
    assert set(column(table, "CPU per launch")) == {""}
    assert host_calls_section(profile).tables == idle_section(profile, 3).tables == ()


def test_tables_for_a_terminal_say_once_what_they_are_of():
    tables = profile_tables(make_profile(), 3)
    assert tables[0].notes[0] == "small.nsys-rep, NVIDIA H200, 2 steps."
    assert sum("small.nsys-rep" in note for table in tables for note in table.notes) == 1
    assert "Phases of a step" in [table.title for table in tables[:2]]


@pytest.mark.parametrize("make", ALL_PROFILES)
def test_share_columns_to_read_add_up(make):
    for table in profile_tables(make(), 100):
        for index, heading in enumerate(table.headings):
            cells = [row[index] for row in table.rows]
            if heading.name == "share":
                parts = cells[:-1] if "step" in table.rows[-1] else cells
                assert sum(map(float, parts)) == pytest.approx(100, abs=0.06 * len(parts))


FILES = {
    *(f"{name}.{ending}" for name in ("phases", "classes", "kernels", "products", "attention", "modules", "blocks",
                                      "idle", "host_calls") for ending in ("csv", "md", "tex", "typ")),
    "gaps.csv", "findings.md", "profile.json",
}  # fmt: skip
ONLY_OF_A_GPU = {name for name in FILES if name.split(".")[0] in ("idle", "gaps", "host_calls")}
ONLY_WITH_RANGES = {name for name in FILES if name.split(".")[0] in ("attention", "blocks")}


def test_files_of_a_profile(tmp_path):
    paths = write_profile(make_profile(), tmp_path / "new" / "kernels", 3)
    directory = tmp_path / "new" / "kernels"
    assert {path.name for path in directory.iterdir() if path.is_file()} == FILES
    assert all(path.stat().st_size for path in paths)
    assert {path for path in directory.rglob("*") if path.is_file()} == set(paths)
    assert decode_profile((directory / "profile.json").read_bytes()) == make_profile()
    for name in FILES - {"profile.json"}:
        text = (directory / name).read_text()
        assert ("small.nsys-rep" in text) is not name.endswith(".csv")
    assert len(list(csv.reader((directory / "blocks.csv").open(newline="")))) == 1 + 4


def test_files_of_another_profile_are_replaced(tmp_path):
    write_profile(make_profile(), tmp_path)
    write_profile(make_cpu_profile(), tmp_path)
    left = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert left == FILES - ONLY_OF_A_GPU - ONLY_WITH_RANGES
    assert "tiny.json" in (tmp_path / "phases.md").read_text()
    assert "operators" in (tmp_path / "kernels.tex").read_text()


EVIL = (HOSTILE, "</script><img onerror=x>", "$x$ \\input{x}", "a\nb|c", "=1+1", "x" * 8000, "`" * 5, "")


def with_names(make: object, text: str) -> StepProfile:
    """The profile with all names of kernels, ranges other than blocks, functions, devices and files replaced."""

    def renamed(value: object, key: str = "") -> object:
        if isinstance(value, dict):
            return {name: renamed(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [renamed(item, key) for item in value]
        is_name = key in ("name", "short_name", "path", "before", "after", "module", "host_call", "source",
                          "device_names", "notes")  # fmt: skip
        return text if is_name and not str(value).startswith("block.") else value

    profile = make(notes=("note",))
    return decode_profile(json.dumps(renamed(json.loads(encode_profile(profile)))).encode())


@pytest.mark.parametrize("text", EVIL)
def test_names_are_inert_in_every_format(text, tmp_path):
    profile = with_names(make_profile, text)
    quiet = with_names(make_profile, "quiet")
    literal = re.compile(r'"(?:[^"\\\n]|\\.)*"')
    for found, harmless in zip(sections(profile, 10), sections(quiet, 10), strict=True):
        for table, other in zip(found.tables, harmless.tables, strict=True):
            written = {ending: write(table) for ending, write in WRITERS.items()}
            assert not re.search(r"<(?:img|/script)", written["md"])
            assert not re.search(r"(?<!\\)\$|\\input", written["tex"].replace(r"$\pm$", ""))
            assert written["tex"].count("\n") == WRITERS["tex"](other).count("\n")
            assert literal.sub("", written["typ"]) == literal.sub("", WRITERS["typ"](other))
            assert all(len(cell) <= 5 * MAX_LABEL for row in table.rows for cell in row)
        parsed = list(csv.reader(io.StringIO(found.csv, newline="")))
        assert len({len(row) for row in parsed}) == 1
        assert not any(cell.startswith("=") for row in parsed for cell in row)
    assert write_profile(replace(profile, device_names=(text[:99],)), tmp_path)


def test_csv_gives_names_in_full():
    long = "k" * 8000
    kernels = kernels_section(with_names(make_profile, long), 3)
    modules = modules_section(with_names(make_profile, long))
    assert {row["name"] for row in rows(kernels)} == {long}
    assert f"block.* > {long} > {long}" in {row["module"] for row in rows(modules)}
