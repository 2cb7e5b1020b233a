"""Speed of reading and explaining large files.

The bounds are those that the project promises, for the best of a few runs, in processor time:
nothing here waits or runs on several cores.
"""

import time
from pathlib import Path

import pytest

from cs336.analysis.kernels.attribution import attribute
from cs336.analysis.kernels.explain import summarise
from cs336.analysis.kernels.readers import read_trace
from tests.analysis.kernels.kineto_files import complete, events_of, write_trace
from tests.analysis.kernels.tracing import Recording, training, write_export

pytestmark = pytest.mark.speed
RUNS = 5


def write_million(path: Path, made: Recording) -> Path:
    """A trace of torch.profiler that has a million events with those of operators."""
    events = events_of(made)
    operator = complete(
        "cpu_op", "aten::mm", 7, 100, 0, 5, **{"External id": 1, "Sequence number": 2, "Ev Idx": 3}
    )
    return write_trace(path, [*events, *[operator] * (1_000_000 - len(events))])


@pytest.mark.parametrize(
    ("write", "limit_s"),
    [(write_million, 1.5), (write_export, 0.3)],
    ids=["a million events of Kineto", "nsys"],
)
def test_sixty_thousand_kernels_are_explained_in_a_moment(
    write, limit_s: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = training(1_350)
    path = write(tmp_path / "trace", made)
    reading_s, summing_s = [], []
    while len(reading_s) < RUNS and min(reading_s, default=limit_s) >= limit_s:
        begun = time.process_time()
        attributed = attribute(read_trace(path))
        reading_s.append(time.process_time() - begun)
        begun = time.process_time()
        profile = summarise(attributed, source="large")
        summing_s.append(time.process_time() - begun)
    assert profile.num_kernels == len(made.kernels) > 60_000
    with capsys.disabled():
        print(
            f"\n{path.stat().st_size / 1e6:.0f} MB: read in {min(reading_s):.2f} s, summed in "
            f"{min(summing_s):.2f} s"
        )
    assert min(reading_s) <= limit_s
    assert min(summing_s) <= 0.5
