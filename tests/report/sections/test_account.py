"""The tables of an account: their rows add up, and say what the closed forms say."""

import csv
import re
from dataclasses import replace

import pytest

from cs336.config import SIZES, Attention, Device, Mode, Parallel, Precision, RunConfig
from cs336.costs.accounting import Component, component_flops, count_parameters
from cs336.costs.communication import TIMED
from cs336.costs.hardware import find_device
from cs336.costs.memory import predict_memory
from cs336.report.formats import csv_of
from cs336.report.sections.account import CSV_COLUMNS, Account, account_section
from tests.costs.live import sent_bytes

H200 = find_device("NVIDIA H200")
FLOPS, COLLECTIVES, INTENSITY = 1, 2, 2
"""Where the tables are."""


def config(size="small", **changes):
    model = {
        name: changes.pop(name)
        for name in ("attention", "context_length", "num_layers")
        if name in changes
    }
    return RunConfig(size=size, model=replace(SIZES[size], **model), device=Device.CUDA, **changes)


def tables(of, top=12, **known):
    return account_section(Account(config=of, **known), top).tables


def column(table, label):
    """Cells by the row's first one; numbers where they are."""
    index = [heading.label for heading in table.headings].index(label)
    return {row[0]: number(row[index]) for row in table.rows}


def number(cell):
    return float(cell.replace(",", "")) if re.fullmatch(r"[\d,.]+", cell) else cell


CASES = [
    config("tiny"),
    config("gpt2", num_layers=2, precision=Precision.BF16, attention=Attention.SDPA),
    config("gpt2", num_layers=2, mode=Mode.INFERENCE),
    config(
        "medium",
        num_layers=3,
        checkpoint_blocks=2,
        mode=Mode.FORWARD_BACKWARD,
        precision=Precision.TF32,
    ),
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
        assert sum(parts) == int(rows["all"][name] or 0), name
    assert int(rows["all"]["parameters"]) == count_parameters(case.model)
    for part in component_flops(case):
        row = rows[part.component]
        assert int(row["backward_flops"]) == part.backward
    assert rows["norms"]["forward_flops"] == "", "unknown, not 0"


@every_case
def test_the_table_of_flops_shows_the_passes_that_the_mode_has(case) -> None:
    table = tables(case)[FLOPS]
    parts = {part.component: part for part in component_flops(case, causal=True)}
    step = column(table, "step, causal (TFLOP)")
    assert step["scores"] == pytest.approx(parts[Component.SCORES].step / 1e12, rel=1e-3)
    assert step["embedding"] == 0
    shares = column(table, "share (%)")
    assert sum(
        share for name, share in shares.items() if name != "all" and share != ""
    ) == pytest.approx(100, abs=0.5)
    labels = [heading.name for heading in table.headings]
    assert ("backward" in labels) == (case.mode is not Mode.INFERENCE)


def test_the_shown_parts_and_the_rest_are_the_peak() -> None:
    case = config("small", context_length=128)
    peak = tables(case, top=5)[-1]
    sizes = [number(row[3]) for row in peak.rows]
    rest = number(re.search(r"hold ([\d,.]+) MiB", peak.notes[0])[1])
    assert len(sizes) == 5
    assert sum(sizes) + rest == pytest.approx(
        predict_memory(case).peak.allocated_bytes / 2**20, rel=1e-3
    )


@pytest.mark.parametrize("way", [Parallel.DDP_NAIVE, Parallel.FSDP])
def test_collectives_of_a_step_send_the_bytes_of_the_closed_form(way) -> None:
    shared = config("tiny", precision=Precision.BF16, parallel=way, ranks=4)
    table = tables(shared)[COLLECTIVES]
    rows = [row["sent_bytes"] for row in table.values]
    assert rows[-1] == sum(rows[:-1]) == pytest.approx(sent_bytes(shared))
    assert not any(heading.name == "predicted" for heading in table.headings), (
        "no time was measured"
    )
    curves = {kind: {2**20: 1e-3} for kind in TIMED}
    *timed, _ = tables(shared, collective_times=curves)[COLLECTIVES].values
    # of 1 MiB/ms above that size, and a millisecond below it
    expected = [row["count"] * max(1.0, row["num_bytes"] / 2**20) for row in timed]
    assert [1e3 * row["time_s"] for row in timed] == pytest.approx(expected)


def test_which_parts_memory_bounds_depends_on_the_device_and_the_shape() -> None:
    """By hand, of an H200's 206 FLOP/byte in bf16: one token uses every weight once, 1 FLOP for
    each byte.
    """
    one_token = config("tiny", context_length=1, batch_size=1, precision=Precision.BF16)
    bound = column(tables(one_token, device=H200)[INTENSITY], "bound by")
    assert set(bound.values()) == {"memory"}
    many = config("small", batch_size=16, precision=Precision.BF16)
    table = tables(many, device=H200)[INTENSITY]
    bound = column(table, "bound by")
    assert {name for name, by in bound.items() if by == "memory"} == {
        "embedding",
        "scores",
        "values",
        "optimizer",
    }
    assert column(table, "takes at least (ms)")["optimizer"] == pytest.approx(
        128_625_408 * 28 / 4.8e9, rel=1e-3
    )
    # causal pairs alone: T / 4 FLOPs for each byte
    for length, by in ((512, "memory"), (1024, "arithmetic")):
        fused = replace(
            many, model=replace(many.model, attention=Attention.SDPA, context_length=length)
        )
        assert column(tables(fused, device=H200)[INTENSITY], "bound by")["scores"] == by
