"""Profiled runs on several machines, which are simulated: what their profilers leave is fetched in parts, and explained
here by the workers of a local sweep."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from cs336_systems.analysis.kernels.explain import explain
from cs336_systems.analysis.kernels.step_profile import encode_profile
from cs336_systems.analysis.memory.notes import notes_path
from cs336_systems.analysis.memory.profile import read_memory_profile
from cs336_systems.config import Device, Parallel, Profiler
from cs336_systems.record import Status, encode_record, load_records
from cs336_systems.sweep.cluster.fetch import MAX_FILE_BYTES, Fetch, FetchError, RawFile
from cs336_systems.sweep.cluster.nodes import Chunk, Left
from cs336_systems.sweep.cluster.run import sweep_on_nodes
from cs336_systems.sweep.run import Loop
from cs336_systems.sweep.store import kernel_profile_path, memory_profile_path, raw_profile_path, raw_profile_paths
from tests.analysis.memory.programs import Training
from tests.faults.harness import Witness as LocalWitness
from tests.faults.harness import contents
from tests.report.making import make_failure
from tests.sweep.cluster.simulated import Cluster, grid, listed, node, record_of

TRACES = Path(__file__).parents[2] / "analysis" / "kernels" / "two_gpus"
TRACE = (TRACES / "ddp.json.gz").read_bytes()


class Witness(LocalWitness):
    """Remembers what is said of machines too."""

    def __init__(self):
        super().__init__()
        self.notes = []

    def noted(self, line):
        self.notes.append(line)


def profiled(count, **changes):
    """Runs with torch.profiler on a GPU."""
    return [replace(config, profiler=Profiler.KINETO, **{"device": Device.CUDA, **changes}) for config in grid(count)]


def traces(config):
    """What the profiler leaves of each rank: a real trace."""
    if config.profiler is Profiler.NONE:
        return {}
    paths = raw_profile_paths(config, Path("runs"))
    return {
        path.name: (TRACES / f"{prefix}ddp.json.gz").read_bytes()
        for path, prefix in zip(paths, ("", "rank1_"), strict=False)
    }


def sweep(configs, directory, cluster, witness=None, **options):
    return sweep_on_nodes(configs, directory, witness or Witness(), cluster.connect, **options)


def files_in(directory):
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def unexplained(monkeypatch):
    """What is fetched is not explained, where that is beside the point."""
    monkeypatch.setattr(Loop, "explain_later", lambda *_: None)


def test_profiles_of_two_ranks_lie_and_are_explained_as_in_a_local_sweep(tmp_path):
    (config,) = profiled(1, parallel=Parallel.DDP_OVERLAP, ranks=2)
    cluster, witness = Cluster([node(0, slots=2)], profile=traces), Witness()
    outcome = sweep([config], tmp_path, cluster, witness)
    assert [record.status for record in outcome.records] == [Status.OK]
    assert outcome.unexplained == ()
    assert witness.explanations == [(config, None)]
    own, other = raw_profile_paths(config, tmp_path / "runs")
    assert own == raw_profile_path(config, tmp_path / "runs")
    assert own.read_bytes() == TRACE
    assert other.read_bytes() == (TRACES / "rank1_ddp.json.gz").read_bytes()
    assert len(cluster.fetches) == 6  # 62,776 and 62,770 bytes in parts of 30,000
    explanation = kernel_profile_path(config, tmp_path / "runs").read_bytes()
    assert explanation == encode_profile(explain(own, config))
    assert cluster.left == {}
    assert {path.split("/")[0] for path in files_in(tmp_path)} == {
        "runs", "traces", "kernels", "environment.json", ".lock",
    }  # fmt: skip


def test_a_gpu_measures_while_a_profile_is_fetched_and_a_cpu_waits(tmp_path, unexplained):
    first_part = {}
    for device in (Device.CUDA, Device.CPU):
        starts = []
        cluster = Cluster([node(0)], profile=traces, chunk_s=5.0)
        begin = cluster.start

        def start(name, config, cluster=cluster, begin=begin, starts=starts):
            starts.append(cluster.clock_s)
            begin(name, config)

        cluster.start = start
        sweep(profiled(2, device=device), tmp_path / device.value, cluster)
        first_part[device] = starts[1]
    assert first_part == {Device.CUDA: 1.0, Device.CPU: 1.0 + 3 * 5.0}


def test_profiles_do_not_pile_up_on_machines(tmp_path, unexplained):
    cluster = Cluster([node(number) for number in range(30)], profile=traces, chunk_s=10.0)
    most = []
    begin = cluster.start
    cluster.start = lambda name, config: (most.append(len(cluster.left) - len(cluster.running)), begin(name, config))
    outcome = sweep(profiled(90), tmp_path, cluster)
    assert len(outcome.records) == 90
    assert 0 < max(most) <= 30 + 8  # one on each machine, and those on their way
    assert cluster.left == {}


DAMAGES = {
    "a byte": lambda data: data[:99] + bytes([data[99] ^ 1]) + data[100:],
    "nothing": lambda data: b"",
    "too much": lambda data: data + b"x",
    "more than a part": lambda data: bytes(2**21),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("part", [0, 2])
def test_a_damaged_part_sends_the_run_elsewhere(tmp_path, unexplained, damage, part):
    configs, witness = profiled(3), Witness()

    class Damaging(Cluster):
        def sent(self, asked, data):
            name, key, _, offset, _ = asked
            bad = name == "node-0" and key == configs[0].key and offset == part * self.chunk_bytes
            return damage(data) if bad else data

    cluster = Damaging([node(0), node(1)], profile=traces)
    outcome = sweep(configs, tmp_path, cluster, witness)
    assert {record.status for record in outcome.records} == {Status.OK}
    assert cluster.given_up == ["node-0"]
    assert any("host-0 is lost" in note for note in witness.notes)
    lost = next(record for record in outcome.records if record.config == configs[0]).lost_tries
    assert len(lost) == 1
    assert f"{configs[0].key}.json.gz" in lost[0]
    assert all(raw_profile_path(config, tmp_path / "runs").read_bytes() == TRACE for config in configs)
    assert len(list((tmp_path / "traces").iterdir())) == 3


@pytest.mark.parametrize("silent", [False, True])
def test_a_machine_that_dies_or_falls_silent_during_a_fetch(tmp_path, unexplained, silent):
    configs = profiled(3)

    class Dying(Cluster):
        def fetch(self, name, key, file, offset):
            if name == "node-0" and offset:
                self.looked = files_in(tmp_path)
                if not silent:
                    self.at(self.clock_s + 0.1, Left(name, "it died"))
            else:
                super().fetch(name, key, file, offset)

    cluster = Dying([node(0), node(1)], profile=traces)
    outcome = sweep(configs, tmp_path, cluster)
    lost = [record for record in outcome.records if record.lost_tries]
    assert {record.status for record in outcome.records} == {Status.OK}
    assert lost
    assert not cluster.looked & {f"traces/{record.key}.json.gz" for record in lost}
    assert not cluster.looked & {f"runs/{record.key}.json" for record in lost}
    assert len(files_in(tmp_path / "traces")) == 3
    assert all(raw_profile_path(config, tmp_path / "runs").read_bytes() == TRACE for config in configs)


def interrupted_at(cluster, when):
    """Ctrl-C as soon as `when()` holds."""
    look, done = cluster.events, []

    def events(timeout_s):
        if not done and when():
            done.append(signal.raise_signal(signal.SIGINT))
        return look(timeout_s)

    cluster.events = events
    return cluster


@pytest.mark.usefixtures("ctrl_c_is_heard")
def test_an_interruption_during_a_fetch_leaves_nothing_of_the_run(tmp_path, unexplained):
    configs = profiled(2)
    cluster = Cluster([node(0)], profile=traces)
    interrupted_at(cluster, lambda: any(asked[1] == configs[1].key and asked[3] for asked in cluster.fetches))
    first = sweep(configs, tmp_path, cluster)
    assert first.interrupted
    assert [record.config for record in first.records] == configs[:1]
    assert files_in(tmp_path / "traces") == {f"{configs[0].key}.json.gz"}
    again = Cluster([node(1)], profile=traces)
    assert len(sweep(configs, tmp_path, again).records) == 2
    assert [config for _, config in again.starts] == configs[1:]
    assert files_in(tmp_path / "traces") == {f"{config.key}.json.gz" for config in configs}


def test_a_driver_that_ended_between_profile_record_and_explanation(tmp_path, monkeypatch):
    configs = profiled(3)
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "explain_later", lambda *_: None)
        first = sweep(configs, tmp_path, Cluster([node(0)], profile=traces))
    assert set(first.unexplained) == set(configs)
    runs = tmp_path / "runs"
    (runs / f"{configs[1].key}.json").unlink()  # killed after the profile, before the record
    raw_profile_path(configs[2], runs).rename(tmp_path / "traces" / f".{configs[2].key}.json.gz.1.tmp")
    (runs / f"{configs[2].key}.json").unlink()  # killed during the fetch
    kept = contents(runs)
    cluster, witness = Cluster([node(1)], profile=traces), Witness()
    outcome = sweep(configs, tmp_path, cluster, witness)
    assert [config for _, config in cluster.starts] == configs[1:]
    assert outcome.unexplained == ()
    assert sorted(config.key for config, why in witness.explanations if not why) == sorted(c.key for c in configs)
    assert contents(runs).items() >= kept.items()
    assert files_in(tmp_path / "traces") == {f"{config.key}.json.gz" for config in configs}
    kernel_profile_path(configs[0], runs).unlink()
    witness = Witness()
    outcome = sweep(configs, tmp_path, Cluster([]), witness)  # nothing is to be measured: no machine is needed
    assert (witness.runs, witness.explanations, outcome.unexplained) == ([], [(configs[0], None)], ())


def test_a_profile_of_an_earlier_run_does_not_stay_beside_a_record_of_a_later_one(tmp_path):
    (config,) = profiled(1)
    runs = tmp_path / "runs"
    sweep([config], tmp_path, Cluster([node(0)], profile=traces))
    assert kernel_profile_path(config, runs).is_file()
    crashed = replace(make_failure(config), status=Status.CRASHED)
    failing = Cluster([node(0)], answer=lambda *_: encode_record(crashed))
    (runs / f"{config.key}.json").unlink()
    assert [record.status for record in sweep([config], tmp_path, failing).records] == [Status.CRASHED]
    assert not kernel_profile_path(config, runs).exists()
    assert not raw_profile_path(config, runs).exists()


LISTS = {
    "a path": lambda key: [listed("../../environment.json", b"{}")],
    "another run's": lambda key: [listed("b.json.gz", TRACE)],
    "another rank's": lambda key: [listed(f"rank1_{key}.json.gz", TRACE)],
    "twice": lambda key: 2 * [listed(f"{key}.json.gz", TRACE)],
    "too large": lambda key: [RawFile(f"{key}.json.gz", MAX_FILE_BYTES + 1, "0")],
    "less than nothing": lambda key: [RawFile(f"{key}.json.gz", -1, "0")],
}


@pytest.mark.parametrize("files", LISTS.values(), ids=LISTS)
def test_a_machine_offers_files_that_cannot_be_the_runs(tmp_path, files):
    (config,) = profiled(1)
    with pytest.raises(FetchError):
        Fetch(config, tmp_path / "runs", files(config.key))

    class Offering(Cluster):
        def at(self, when_s, event):
            event = replace(event, files=tuple(files(config.key))) if hasattr(event, "files") else event
            super().at(when_s, event)

    outcome = sweep([config], tmp_path, Offering([node(0)], profile=traces))
    assert [record.status for record in outcome.records] == [Status.INVALID]
    assert files_in(tmp_path) == {f"runs/{config.key}.json", ".lock"}
    assert load_records(tmp_path / "runs")[1] == []


def test_parts_that_nobody_asked_for_change_nothing(tmp_path, unexplained):
    """One comes before its run has ended, one while its run waits for eight others to be fetched, one too late."""
    configs = profiled(9)
    cluster = Cluster([node(number) for number in range(9)], profile=traces)
    for number, when_s in ((0, 0.5), (8, 1.1), (0, 1.9)):
        key = configs[number].key
        cluster.at(when_s, Chunk(f"node-{number}", key, f"{key}.json.gz", 0, b"not asked for"))
    cluster.at(0.7, Chunk("node-9", configs[0].key, f"{configs[0].key}.json.gz", 0, b"of a stranger"))
    outcome = sweep(configs, tmp_path, cluster)
    assert {record.status for record in outcome.records} == {Status.OK}
    assert cluster.given_up == []
    assert all(raw_profile_path(config, tmp_path / "runs").read_bytes() == TRACE for config in configs)


def test_an_empty_file_and_notes_beside_a_snapshot(tmp_path, unexplained):
    config = replace(profiled(1)[0], profiler=Profiler.MEMORY)
    left = {f"{config.key}.pickle": b"", f"{config.key}.notes.json": b"{}\n"}
    cluster = Cluster([node(0)], profile=lambda _: left, answer=lambda config, _: encode_record(record_of(config)))
    sweep([config], tmp_path, cluster)
    found = {path.name: path.read_bytes() for path in (tmp_path / "snapshots").iterdir()}
    assert found == left


@pytest.mark.parametrize("status", [Status.OK, Status.OOM])
def test_a_snapshot_is_explained_of_a_run_out_of_memory_too(tmp_path, status):
    config = replace(profiled(1)[0], profiler=Profiler.MEMORY)
    training = Training()
    training.step(0)
    made = training.end(tmp_path)
    left = {f"{config.key}.pickle": made.read_bytes(), f"{config.key}.notes.json": notes_path(made).read_bytes()}
    record = record_of(config) if status is Status.OK else make_failure(config)
    assert record.status is status
    cluster = Cluster([node(0)], profile=lambda _: left, answer=lambda *_: encode_record(record))
    outcome = sweep([config], tmp_path / "out", cluster)
    assert ([found.status for found in outcome.records], outcome.unexplained) == ([status], ())
    profile = read_memory_profile(memory_profile_path(config, tmp_path / "out" / "runs"))
    assert (profile.num_steps, profile.source) == (1, f"{config.key}.pickle")


def test_a_snapshot_that_would_run_code_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = replace(profiled(1)[0], profiler=Profiler.MEMORY)
    left = {f"{config.key}.pickle": b"cos\nsystem\n(S'touch pwned'\ntR."}
    witness = Witness()
    outcome = sweep([config], tmp_path / "out", Cluster([node(0)], profile=lambda _: left), witness)
    assert outcome.unexplained == (config,)
    assert [found for found, why in witness.explanations if why] == [config]
    assert not (tmp_path / "pwned").exists()
