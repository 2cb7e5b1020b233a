import re
from pathlib import Path

import pytest

from cs336_systems.analysis.columns import ProfileError
from cs336_systems.config import Profiler
from cs336_systems.report.entries import MOST_WARNINGS, load_entries
from tests.report.making import make_config, make_record


@pytest.mark.parametrize("count", [1, MOST_WARNINGS, MOST_WARNINGS + 1, 40])
def test_each_profile_that_cannot_be_read_is_named_or_counted(capsys, count) -> None:
    records = [make_record(make_config("small", 128 + i, profiler=Profiler.MEMORY), [0.1]) for i in range(count)]

    def load(record):
        raise ProfileError(Path("kernels.json"), "no such file")

    assert load_entries(records, (Profiler.MEMORY,), load) == []
    lines = capsys.readouterr().err.splitlines()
    named = [line for line in lines if "no such file" in line]
    (rest,) = [int(re.search(r"\d+", line)[0]) for line in lines if line not in named] or [0]
    assert len(lines) == min(count, MOST_WARNINGS)
    assert len(named) + rest == count
