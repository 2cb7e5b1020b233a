"""The table of a comparison: what is known of each side, and no interval where there is none."""

import re

import pytest
import scipy.stats

from cs336_systems.analysis.compare import compare
from cs336_systems.report.formats import WRITERS
from cs336_systems.report.sections.comparison import comparison_table


@pytest.mark.parametrize(("num_a", "num_b"), [(2, 2), (2, 5), (5, 5)])
def test_the_means_of_all_processes_and_an_interval_of_three_or_more(num_a, num_b):
    sides = [[0.1 + i / 1e3 for i in range(num_a)], [0.2 + i / 1e3 for i in range(num_b)]]
    table = comparison_table(("x", "y"), sides, compare(*sides))
    cells = [dict(zip([heading.name for heading in table.headings], row, strict=True)) for row in table.rows]
    for row, means in zip(cells, sides, strict=True):
        assert row["step of each process"] == ", ".join(f"{mean * 1e3:.3f}" for mean in means)
        if len(means) < 3:
            assert (row["step"], row.get("95 % interval", "")) == (f"{sum(means) / len(means) * 1e3:.1f}", "")
        else:
            expected = scipy.stats.t.interval(0.95, len(means) - 1, sum(means) / len(means), scipy.stats.sem(means))
            ends = [float(end) / 1e3 for end in row["95 % interval"].split(" to ")]
            assert ends == pytest.approx(expected, rel=1e-2)
            assert "±" in row["step"]
    if min(num_a, num_b) < 3:
        assert any("--repeats 5" in note for note in table.notes)
    if max(num_a, num_b) < 3:
        assert not any(re.search(r"\d to [+-]?\d|±", write(table)) for write in WRITERS.values())
