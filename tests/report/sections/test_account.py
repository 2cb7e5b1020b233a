"""The tables of an account: their rows add up, and say what the closed forms say."""

import csv
import re
from dataclasses import replace

import pytest

from cs336_systems.config import SIZES, Attention, Device, Mode, Parallel, Precision, RunConfig
from cs336_systems.costs.accounting import Component, component_flops, count_parameters, mfu
from cs336_systems.costs.communication import Collective
from cs336_systems.costs.hardware import find_device
from cs336_systems.costs.memory import predict_memory
from cs336_systems.report.formats import csv_of
from cs336_systems.report.sections.account import CSV_COLUMNS, Account, account_json, account_section
from tests.costs.live import sent_bytes

H200 = find_device("NVIDIA H200")
FLOPS, INTENSITY = 1, 2
"""Where the tables are that every configuration has."""
MOMENTS, COLLECTIVES = 2, 3
"""Where those are that configurations of several ranks have."""


def config(size="small", **changes):
    model = {name: changes.pop(name) for name in ("attention", "context_length") if name in changes}
    return RunConfig(size=size, model=replace(SIZES[size], **model), device=Device.CUDA, **changes)


def tables(of, device=None, step_s=None, memory_bytes=None, top=12):
    return account_section(Account(config=of, device=device, step_s=step_s, memory_bytes=memory_bytes), top).tables


def column(table, label):
    """Cells by the row's first one; numbers where they are."""
    index = [heading.label for heading in table.headings].index(label)
    return {row[0]: number(row[index]) for row in table.rows}


def number(cell):
    return float(cell.replace(",", "")) if re.fullmatch(r"[\d,.]+", cell) else cell


CASES = [
    config("tiny"),
    config("gpt2", precision=Precision.BF16, attention=Attention.SDPA),
    config("gpt2", mode=Mode.INFERENCE),
    config("medium", checkpoint_blocks=5, mode=Mode.FORWARD_BACKWARD, precision=Precision.TF32),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.label.replace(" ", "-"))


@every_case
def test_the_csv_holds_every_part_and_their_sum(case) -> None:
    section = account_section(Account(config=case), 12)
    rows = {row["component"]: row for row in csv.DictReader(csv_of(section).splitlines())}
    assert list(rows) == [*Component, "all"]
    assert tuple(rows["all"]) == CSV_COLUMNS
    for name in CSV_COLUMNS[1:]:
        parts = [int(rows[component][name] or 0) for component in Component]
        assert sum(parts) == int(rows["all"][name]), name
    assert int(rows["all"]["parameters"]) == count_parameters(case.model)
    for part in component_flops(case):
        row = rows[part.component]
        assert int(row["backward_flops"]) == part.backward
        assert int(row["hardware_flops"]) == part.forward + part.backward + part.recomputed
    assert rows["norms"]["forward_flops"] == "", "unknown, not 0"


@every_case
def test_the_table_of_flops_shows_the_passes_that_the_mode_has(case) -> None:
    table = tables(case)[FLOPS]
    parts = {part.component: part for part in component_flops(case, causal=True)}
    step = column(table, "forward, causal (TFLOP)")
    assert step["scores"] == pytest.approx(parts[Component.SCORES].forward / 1e12, rel=1e-3)
    assert step["embedding"] == 0
    shares = column(table, "share (%)")
    assert sum(share for name, share in shares.items() if name != "all" and share != "") == pytest.approx(100, abs=0.5)
    labels = [heading.name for heading in table.headings]
    assert ("backward" in labels) == (case.mode is not Mode.INFERENCE)
    again = sum(part.recomputed for part in parts.values())
    assert ("again" in labels) == (again > 0)
    assert any("the hardware's are" in note for note in table.notes) == (again > 0)


def test_which_parts_memory_bounds_depends_on_the_device_and_the_shape() -> None:
    """By hand, of an H200's 206 FLOP/byte in bf16: one token uses every weight once, 1 FLOP for each byte."""
    one_token = config("small", context_length=1, batch_size=1, precision=Precision.BF16)
    bound = column(tables(one_token, H200)[INTENSITY], "bound by")
    assert set(bound.values()) == {"memory"}
    many = config("small", batch_size=16, precision=Precision.BF16)
    table = tables(many, H200)[INTENSITY]
    bound = column(table, "bound by")
    assert {name for name, by in bound.items() if by == "memory"} == {"embedding", "scores", "values", "optimizer"}
    assert column(table, "takes at least (ms)")["optimizer"] == pytest.approx(128_625_408 * 28 / 4.8e9, rel=1e-3)
    assert "206.1 FLOP/byte" in table.notes[-1]
    for length, by in ((512, "memory"), (1024, "arithmetic")):  # causal pairs alone: T / 4 FLOPs for each byte
        fused = replace(many, model=replace(many.model, attention=Attention.SDPA, context_length=length))
        assert column(tables(fused, H200)[INTENSITY], "bound by")["scores"] == by


def test_without_a_known_peak_nothing_is_said_to_be_bound() -> None:
    without = tables(config("tiny"))[INTENSITY]
    assert "bound by" not in [heading.name for heading in without.headings]
    unknown = tables(config("tiny"), find_device("B200"))[INTENSITY]
    assert set(column(unknown, "bound by").values()) == {""}
    assert unknown.notes[-1] == "No peak of B200 at fp32 is known."


@pytest.mark.parametrize("checkpoint_blocks", [0, 3])
def test_rates_follow_from_the_time(checkpoint_blocks) -> None:
    case = config("small", precision=Precision.BF16, checkpoint_blocks=checkpoint_blocks)
    parts = component_flops(case)
    rates = tables(case, H200, step_s=0.02)[3]
    found = column(rates, "value")
    flops = sum(part.step for part in parts)
    assert found["tokens"] == pytest.approx(4 * 512 / 0.02, rel=1e-3)
    assert found["MFU"] == pytest.approx(100 * mfu(flops / 0.02, "NVIDIA H200", Precision.BF16), rel=1e-3)
    assert found["with attention counted as causal"] < found["MFU"]
    assert ("with what is computed again" in found) == (checkpoint_blocks > 0)
    if checkpoint_blocks:
        hardware = sum(part.hardware for part in parts)
        assert found["with what is computed again"] == pytest.approx(found["MFU"] * hardware / flops, rel=1e-3)


@pytest.mark.parametrize("device", [None, "B200"])
def test_there_is_no_mfu_of_an_unknown_peak(device) -> None:
    rates = tables(config("small"), device and find_device(device), step_s=0.02)[3]
    assert "MFU" not in column(rates, "value")
    assert rates.notes[0].startswith("No MFU")


def test_the_shown_parts_and_the_rest_are_the_peak() -> None:
    case = config("small", context_length=128)
    peak, _ = tables(case, top=5)[-2:]
    sizes = [number(row[3]) for row in peak.rows]
    rest = number(re.search(r"hold ([\d,.]+) MiB", peak.notes[0])[1])
    assert len(sizes) == 5
    assert sum(sizes) + rest == pytest.approx(predict_memory(case).peak.allocated_bytes / 2**20, rel=1e-3)


def test_a_part_is_a_row_of_its_own() -> None:
    case = config("tiny")
    peak, _ = tables(case, top=1000)[-2:]
    assert len(peak.rows) == len(predict_memory(case).peak.parts)


@pytest.mark.parametrize("way", [Parallel.DDP_NAIVE, Parallel.FSDP])
def test_collectives_of_a_step_send_the_bytes_of_the_closed_form(way) -> None:
    shared = config("small", precision=Precision.BF16, parallel=way, ranks=4)
    table = tables(shared)[COLLECTIVES]
    rows = [row["calls_sent_mib"] for row in table.values]
    assert rows[-1] == sum(rows[:-1]) == pytest.approx(sent_bytes(shared) / 2**20)
    assert not any(heading.name == "predicted" for heading in table.headings), "no time was measured"
    curves = {kind: {2**20: 1e-3} for kind in Collective}
    timed = account_json(Account(config=shared, collective_times=curves))["collectives"]
    # of 1 MiB/ms above that size, and a millisecond below it
    expected = [row["count"] * max(1.0, row["num_bytes"] / 2**20) / 1e3 for row in timed]
    assert [row["time_s"] for row in timed] == pytest.approx(expected)


def test_what_a_rank_holds_at_the_moments_of_the_course() -> None:
    """By hand: with plenty of parameters, 4 bytes of each, and 8 of those that the rank's optimizer updates."""
    shared = config("small", parallel=Parallel.FSDP2, ranks=2)
    rows = tables(shared)[MOMENTS].values
    parameters = 4 * 128_625_408 / 2 / 2**30
    held = [(row["rank_parameter_gib"], row["rank_gradient_gib"], row["rank_state_gib"]) for row in rows]
    for found, factors in zip(held, [(1, 0, 0), (1, 1, 0), (1, 0, 2), (1, 1, 2)], strict=True):
        assert found == pytest.approx([factor * parameters for factor in factors], rel=1e-4)
    for row, sizes in zip(rows, held, strict=True):
        assert sum(sizes) < row["rank_predicted_gib"] < sum(sizes) + 0.2
