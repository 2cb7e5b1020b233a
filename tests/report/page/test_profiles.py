"""What the page says of a memory profile beside its figure."""

import json
from pathlib import Path

import pytest

from cs336_systems.analysis.memory.profile import read_memory_profile
from cs336_systems.report.page.profiles import memory_picture, peak_parts

PROFILES = sorted((Path(__file__).parents[3] / "data/published/memory_profiles/h200/memory").glob("*.json"))
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def num_bytes(text):
    amount, unit = text.split()
    return float(amount) * UNITS[unit]


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_what_holds_the_peak_is_all_of_it_and_is_in_order(path) -> None:
    peak = json.loads(path.read_text())["peak"]
    *parts, whole = peak_parts(read_memory_profile(path))
    assert num_bytes(whole[1]) == pytest.approx(peak["allocated_bytes"], rel=1e-3)
    held = {row["category"]: row["num_bytes"] for row in peak["categories"] if row["num_bytes"]}
    assert [name for name, *_ in parts] == sorted(held, key=lambda name: -held[name])
    for name, amount, share in parts:
        assert num_bytes(amount) == pytest.approx(held[name], rel=5e-3)
        percent = 100 * held[name] / peak["allocated_bytes"]
        assert float(share.strip("< %")) == pytest.approx(percent, abs=0.1 if "<" in share else 0.0501)


def test_each_phase_has_its_name_below_it_and_the_peak_is_named_within_the_picture() -> None:
    path = next(path for path in PROFILES if "xl_ctx512_b4_train_fp32" in path.name)
    layout = memory_picture(read_memory_profile(path))["layout"]
    axis, bands = layout["xaxis"], layout["shapes"]
    assert axis["ticktext"] == ["forward 0", "backward 0", "optimizer 0", "forward 1", "backward 1", "optimizer 1"]
    assert all(band["x0"] < place < band["x1"] for place, band in zip(axis["tickvals"], bands, strict=True))
    (peak,) = layout["annotations"]
    assert peak["text"] == "peak 41.72 GiB, in backward"
    assert peak["y"] < layout["yaxis"]["range"][1]
