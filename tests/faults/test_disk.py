"""Records survive whatever happens while they are written: death at any moment, a full disk,
damage.
"""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import chdir
from dataclasses import replace

import pytest

from cs336.record import Status, load_records, read_record, write_record
from cs336.sweep.store import SweepError
from tests.faults.harness import (
    ROOT,
    Witness,
    command,
    config,
    contents,
    lay_out_models,
    path_of,
    runs,
    sweep,
)

WRITE = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from cs336.record import read_record, write_record
from dataclasses import replace

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

record = read_record(Path(sys.argv[1]))
{injection}
write_record(replace(record, started_at="later"), Path(sys.argv[1]).parent)
"""
STAGES = {
    "before the first byte": "Path.open = die",
    "between two bytes": """
import io
def open_half(self, *arguments):
    file = io.open(self, *arguments, buffering=0)
    class Half:
        def __enter__(self): return self
        def __exit__(self, *_): pass
        def write(self, data): file.write(data[: len(data) // 2]); die()
    return Half()
Path.open = open_half
""",
    "before the bytes are on the disk": "os.fsync = die",
    "before the rename": "Path.replace = die",
    "after the rename": (
        "replace_ = Path.replace; Path.replace = lambda *paths: (replace_(*paths), die())"
    ),
    "before the rename is on the disk": "os.fsync = lambda file: setattr(os, 'fsync', die)",
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory, preloaded):
    """A directory with the records of two good runs, to be copied."""
    directory = tmp_path_factory.mktemp("measured")
    with chdir(directory):
        lay_out_models(directory)
        sweep(directory, config(), config(seed=1))
    return directory


@pytest.mark.parametrize("stage", STAGES)
def test_death_at_a_stage_of_writing_leaves_the_old_record_or_the_new(measured, place, stage):
    overwritten, untouched = config(), config(seed=1)
    shutil.copytree(measured / "runs", place / "runs", copy_function=shutil.copy2)
    earlier = contents(place / "runs")
    old = read_record(path_of(overwritten, place))
    script = WRITE.format(root=str(ROOT), injection=STAGES[stage])
    ended = subprocess.run([sys.executable, "-c", script, path_of(overwritten, place)])
    assert ended.returncode == -signal.SIGKILL
    records, problems = load_records(place / "runs")
    assert problems == []
    assert [record.config for record in records] == sorted(
        (overwritten, untouched), key=lambda run: run.key
    )
    found = read_record(path_of(overwritten, place))
    assert found.started_at == (
        "later" if "rename is" in stage or "after" in stage else old.started_at
    )
    assert (
        contents(place / "runs")[path_of(untouched, place).name]
        == earlier[path_of(untouched, place).name]
    )
    sweep(place, overwritten, untouched)
    assert set(contents(place / "runs")) == set(earlier)  # what the dead writer left is swept up


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def become_a_directory(path):
    path.unlink()
    path.mkdir()


def become_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def lose_its_target(path):
    path.unlink()
    path.symlink_to("nowhere")


DAMAGES = (halve, become_a_directory, become_a_pipe, lose_its_target)


def test_damaged_records_are_set_aside_reported_and_measured_again(place):
    whole, *damaged = (config(seed=seed) for seed in range(1 + len(DAMAGES)))
    sweep(place, whole)
    name = path_of(whole, place).name
    earlier = contents(place / "runs")[name]
    left = {}
    for run, damage in zip(damaged, DAMAGES, strict=True):
        path = write_record(replace(read_record(path_of(whole, place)), config=run), place / "runs")
        damage(path)
        left[path] = path.read_bytes() if path.is_file() and not path.is_symlink() else None
    witness = Witness()
    outcome = sweep(place, whole, *damaged, witness=witness)
    assert {problem.path for problem in witness.problems} == set(left)
    assert witness.runs == damaged
    assert [record.status for record in outcome.records] == [Status.OK] * (1 + len(DAMAGES))
    assert contents(place / "runs")[name] == earlier
    for path, data in left.items():
        aside = path.with_name(f"{path.name}.invalid")
        assert os.path.lexists(aside)
        assert data is None or aside.read_bytes() == data


def in_a_small_file_system(words):
    """`words`, run where ./data is a file system of 256 KiB of its own, copied to ./after at the
    end.
    """
    namespace = (
        ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    )
    mount = "mkdir data && mount -t tmpfs -o size=256k none data || exit 99"
    script = f'{mount}; "$@"; status=$?; cp -r data after; exit $status'
    return [*namespace, "sh", "-c", script, "sh", *words]


@pytest.fixture
def small_file_system(place):
    probe = in_a_small_file_system(["true"])
    if not shutil.which(probe[0]) or subprocess.run(probe, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("no file system can be mounted here")
    for made in ("data", "after"):
        shutil.rmtree(made)


def test_a_full_disk_stops_the_sweep_and_keeps_what_there_is(launch, place, small_file_system):
    again = " ".join(f"'{word}'" for word in command("fills_the_disk"))
    both = ["sh", "-c", f"{again} 2>first; echo $? >status; {again}"]
    sweep = launch(in_a_small_file_system(both))
    assert sweep.wait() == 1
    first = (place / "first").read_text()
    assert (place / "status").read_text().strip() == "1"
    assert "error: the record of custom_ctx8_" in first
    assert "No space left on device" in first
    assert "the same command again" in first
    assert "Traceback" not in first
    # The second time there is no room from the start: said before any run.
    assert "cannot write there (No space left on device)" in sweep.stderr
    assert "Traceback" not in sweep.stderr
    (before,) = (place / "before").iterdir()
    after = place / "after" / runs(place).relative_to(place / "data")
    assert [path.name for path in after.iterdir()] == [before.name]
    assert (after / before.name).read_bytes() == before.read_bytes()


def test_a_worker_that_cannot_write_stops_the_sweep(place):
    sweep(place, config())
    earlier = contents(place / "runs")
    witness = Witness()
    with pytest.raises(
        SweepError, match=r"could not be written.*File too large.*same command again"
    ):
        sweep(place, config(), config("cannot_write_files"), config(seed=1), witness=witness)
    assert witness.runs == [config("cannot_write_files")]
    assert contents(place / "runs") == earlier
