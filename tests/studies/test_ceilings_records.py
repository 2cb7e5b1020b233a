"""Records of ceilings: values worked out by hand, refused files and grids, and ceilings found by
their device.
"""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from cs336.commands.account import ForecastArguments
from cs336.config import Device, Precision
from cs336.costs.hardware import bare_name
from cs336.files import encode_json
from cs336.record import Failure, RecordError, Status
from cs336.studies.ceilings_files import ceilings_beside, load_ceilings, shipped
from cs336.studies.ceilings_records import CeilingsGrid, CeilingsStudy, ProductPrecision
from cs336.studies.ceilings_rows import Loops, ProductCell, joined
from cs336.studies.records import read_study
from tests.committed import DATA
from tests.report.ceilings import (
    BF16,
    FP32,
    MIB,
    lasting,
    make_ceilings,
    make_rates,
    make_whole,
    product_at,
    square,
    stream_at,
)
from tests.report.making import H200, make_environment


def hostile(**changes: object) -> bytes:
    """A good study with parts of its JSON replaced."""
    raw = msgspec.json.decode(encode_json(make_whole()))
    for place, value in changes.items():
        *outer, last = place.split("__")
        inner = raw
        for key in outer:
            inner = inner[int(key) if key.isdigit() else key]
        inner[last] = value
    return msgspec.json.encode(raw)


@pytest.mark.parametrize(
    "data",
    [
        hostile(products=[{}]),
        hostile(products__0__shape__inner=0),
        hostile(products__0__timing__loops__times_s=[0.0]),
        hostile(reductions__0__world_size=0),
    ],
    ids=["no cell", "no side", "no time", "one process"],
)
def test_a_file_that_is_no_study_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "ceilings.json"
    path.write_bytes(data)
    with pytest.raises(RecordError, match="not a study of ceilings"):
        read_study(path, CeilingsStudy)


def test_a_ceiling_is_found_by_the_name_of_the_device(tmp_path: Path) -> None:
    studies = {
        "a": make_ceilings([product_at(square(512), 700)], [stream_at(4100)]),
        "b": make_ceilings(
            [product_at(square(512), 750), product_at(square(512), 40, FP32)], [stream_at(4000)]
        ),
        "other": make_ceilings(
            [product_at(square(512), 900)], [stream_at(9000)], device_name="NVIDIA H200 NVL"
        ),
    }
    for name, study in studies.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "ceilings.json").write_bytes(encode_json(study))
    found = load_ceilings(tmp_path)
    assert found.studies == (studies["a"], studies["b"], studies["other"])
    assert found.flops_per_s(H200, Precision.BF16) == pytest.approx(750e12)
    assert found.flops_per_s("H200", Precision.BF16) == pytest.approx(750e12), (
        "as the data sheet calls it"
    )
    assert found.flops_per_s(H200, ProductPrecision.FP32) == pytest.approx(40e12)
    assert found.flops_per_s("NVIDIA H200 NVL", Precision.BF16) == pytest.approx(900e12)
    assert replace(found, has_shipped=False).flops_per_s(H200, Precision.TF32) is None
    assert found.flops_per_s("NVIDIA H100 NVL", Precision.BF16) is None
    assert load_ceilings(tmp_path / "b").studies == (studies["b"],)
    assert load_ceilings(tmp_path / "nowhere").studies == ()
    (tmp_path / "a" / "ceilings.json").write_bytes(b"{")
    with pytest.raises(RecordError, match="not a study"):
        load_ceilings(tmp_path)


def test_a_group_of_results_has_the_ceilings_beside_it_unless_it_has_its_own(
    tmp_path: Path,
) -> None:
    grouped, (outer, inner) = (
        tmp_path / "group/e2e_benchmark/one",
        (tmp_path / "ceilings", tmp_path / "group/ceilings"),
    )
    assert ceilings_beside(grouped) == inner
    outer.mkdir()
    assert ceilings_beside(grouped) == ceilings_beside(tmp_path / "e2e_benchmark/two") == outer
    inner.mkdir(parents=True)
    assert ceilings_beside(grouped) == inner


def test_shipped_ceilings_are_the_published_ones(tmp_path: Path) -> None:
    published = {study.device_name for study in load_ceilings(DATA / "ceilings").studies}
    assert sorted(map(bare_name, published)) == load_ceilings(tmp_path).device_names
    for name in published:
        own = [
            study for study in load_ceilings(DATA / "ceilings").studies if study.device_name == name
        ]
        assert [*map(encode_json, shipped(name))] == [*map(encode_json, own)], (
            "in this order: the first one counts"
        )


def test_what_the_user_measured_comes_before_what_is_shipped(tmp_path: Path) -> None:
    """By a study of 1 TFLOP/s, far below any H200."""
    nothing = load_ceilings(tmp_path)
    assert nothing.curves(H200).is_shipped
    rate = nothing.flops_per_s(H200, Precision.BF16)
    assert rate is not None
    assert rate > 500e12
    assert nothing.curves("NVIDIA of nobody") is None
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/ceilings.json").write_bytes(encode_json(make_rates(tflops_per_s=1.0)))
    own = load_ceilings(tmp_path)
    assert own.flops_per_s(H200, Precision.BF16) == pytest.approx(1e12)
    curves = own.curves(H200)
    assert curves is not None
    assert not curves.is_shipped
    time = curves.matmul_time(Precision.BF16, 8192, 8192, 8192)
    assert time is not None
    assert time.time_s == pytest.approx(2 * 8192**3 / 1e12)


@pytest.mark.parametrize("seed", range(8))
def test_a_measured_cpu_is_never_the_gpu_that_a_forecast_is_of(tmp_path: Path, seed: int) -> None:
    """Drawn studies of CPUs and GPUs: only a single GPU is meant where none is named."""
    rng, gpus = random.Random(seed), []
    for number in range(rng.randint(0, 4)):
        device = rng.choice([*Device])
        name = f"Maker {device} {number}"
        gpus += [name] * (device is Device.CUDA)
        (tmp_path / str(number)).mkdir()
        study = make_rates(device=device, device_name=name)
        (tmp_path / str(number) / "ceilings.json").write_bytes(encode_json(study))
    found = load_ceilings(tmp_path)
    assert found.measured_names == gpus
    meant = ForecastArguments().machine(found)
    assert meant == (gpus[0] if len(gpus) == 1 else None, None)


@pytest.mark.parametrize(("spread", "is_in_doubt"), [(0.001, False), (0.5, True)])
def test_forecasts_from_ceilings_in_doubt_are_in_doubt(
    tmp_path: Path, spread: float, is_in_doubt: bool
) -> None:
    study = make_rates()
    products = tuple(
        product_at(square(8192), 1.0, cell.precision, spread=spread) for cell in study.products
    )
    streams = tuple(replace(cell, timing=lasting(1e-3, spread=spread)) for cell in study.streams)
    (tmp_path / "ceilings.json").write_bytes(
        encode_json(replace(study, products=products, streams=streams))
    )
    curves = load_ceilings(tmp_path).curves(H200)
    assert curves is not None
    assert curves.is_in_doubt is is_in_doubt


GRID = CeilingsGrid(device=Device.CPU, shapes=(square(8),), precisions=(FP32,), stream_bytes=(MIB,))


def test_a_cpu_that_is_taken_away_for_seconds_changes_no_median() -> None:
    """A quarter of the study, whichever, takes ten times as long: of no cell are that most of
    the loops.
    """
    grid = replace(GRID, shapes=tuple(map(square, range(1, 9))), precisions=(FP32, BF16), loops=5)
    [cells] = grid.groups()
    assert Counter(cells) == dict.fromkeys(grid.cells(), 5)
    quarter = len(cells) // 4
    for first in range(len(cells)):
        slow = range(first, first + quarter)
        rows = [
            cell.rows[0].with_loops(lasting(1.0 + 9.0 * (at in slow)).loops)
            for at, cell in enumerate(cells)
        ]
        study = grid.study(tuple(rows), make_environment())
        assert {timing.time_s for timing in study.timings} == {1.0}
        assert [len(timing.loops.times_s) for timing in study.timings] == [5 * 3] * len(
            cells[: len(cells) // 5]
        )


def test_loops_of_rounds_are_joined() -> None:
    """Of 4 repetitions and of 2; a round that failed fails the cell, whichever it was."""
    row = ProductCell(precision=FP32, shape=square(8), timing=lasting(1.0))
    few, many = Loops(count=2, times_s=(4.0,)), Loops(count=4, times_s=(4.0, 12.0))
    [both] = joined([row.with_loops(many), row.with_loops(few)])
    assert sorted(time_s / both.timing.loops.count for time_s in both.timing.loops.times_s) == [
        1.0,
        2.0,
        3.0,
    ]
    failed = row.failed(Status.CRASHED, Failure(message="gone"))
    assert [*joined([row, failed, row])] == [*joined([failed, row, row])] == [failed]
