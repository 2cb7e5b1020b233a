"""Speed and memory of reading and replaying snapshots, on a large file of realistic content.

The bounds are those that the project promises, for the best of a few runs, in processor time.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cs336_systems.analysis.memory.allocations import Replay, replay
from cs336_systems.analysis.memory.snapshot import read_snapshot
from cs336_systems.analysis.memory.stacks import Stack
from tests.analysis.kernels.test_speed import best_s
from tests.analysis.memory.snapshots import Allocator, repeated, snapshot_of, train, write

pytestmark = pytest.mark.speed
LIMIT_S = 1.0
NUM_EVENTS = 1_000_000
MAX_MEMORY = 8
"""Times the file."""


@pytest.fixture(scope="module")
def million(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Allocator]:
    """A snapshot of a million events, equal steps of training; and the allocator with the truth of one step."""
    made = Allocator()
    for _ in range(300):
        made.malloc(3_000_000)
    train(made, 2)
    made.record()
    train(made, 3)
    assert made.events
    content = snapshot_of(made)
    content["device_traces"] = [repeated(made.events, NUM_EVENTS)]
    return write(tmp_path_factory.mktemp("speed") / "snapshot.pickle", content), made


def peak_of(path: Path) -> tuple[Replay, tuple[Stack, ...]]:
    """All that is needed to list what is in use at the peak, with its stacks."""
    found = read_snapshot(path)
    replayed = replay(found.devices[0], found.settings)
    in_use = replayed.in_use(replayed.peak)
    _, stacks = found.stacks.distinct(replayed.allocations.stack[in_use])
    return replayed, stacks


def test_a_million_events(million: tuple[Path, Allocator], capsys: pytest.CaptureFixture[str]) -> None:
    path, made = million
    replayed, stacks = peak_of(path)
    assert len(replayed.memory.events) >= NUM_EVENTS
    assert len(stacks) > 100
    active = [moment.active for moment in made.truth]
    np.testing.assert_array_equal(replayed.active_bytes[: len(active)], active)
    assert replayed.active_bytes.max() == max(active)
    assert len(replayed.in_use(replayed.peak)) == len(made.truth[active.index(max(active))].in_use) > 400
    del replayed
    took_s = best_s(lambda: peak_of(path), LIMIT_S)
    with capsys.disabled():
        print(f"\nsnapshot, a million events, {path.stat().st_size / 1e6:.0f} MB: {took_s:.2f} s")
    assert took_s <= LIMIT_S


MEASURE = """
import sys
from pathlib import Path
import numpy.ma
from tests.analysis.memory.test_snapshot_speed import peak_of

def peak_kib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

before = peak_kib()
found = peak_of(Path(sys.argv[1]))
print((peak_kib() - before) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory as Linux tells it")
def test_memory_is_bounded_by_the_file(million: tuple[Path, Allocator], capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = million
    done = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    share = int(done.stdout) / path.stat().st_size
    with capsys.disabled():
        print(f"\nsnapshot, a million events: memory {share:.2f} times the file")
    assert 1 < share <= MAX_MEMORY
