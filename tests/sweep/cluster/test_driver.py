"""The driver of a sweep on several machines, which are simulated: real records, drawn times and faults."""

import random
import signal
import time
from collections import Counter
from dataclasses import replace

import pytest

from cs336_systems.config import Device, Parallel, Profiler
from cs336_systems.record import RunWarning, Status, WarningCode, encode_record, load_records
from cs336_systems.sweep.cluster.conditions import Conditions, refusals
from cs336_systems.sweep.cluster.nodes import Answer, Joined, Left, Look, Pending, Unfit
from cs336_systems.sweep.cluster.run import sweep_on_nodes
from cs336_systems.sweep.cluster.waiting import Placement
from cs336_systems.sweep.listener import Listener
from cs336_systems.sweep.store import SweepError
from tests.sweep.cluster import simulated
from tests.sweep.cluster.simulated import IDENTITY, Cluster, drawn, grid, node, record_of


class Witness(Listener):
    """Remembers what it was told."""

    def __init__(self):
        self.started_runs, self.finished_records, self.notes, self.moments = [], [], [], []

    def machines(self, now):
        self.moments.append(now)

    def started(self, config, gpu):
        self.started_runs.append(config)

    def finished(self, record):
        self.finished_records.append(record)

    def noted(self, line):
        self.notes.append(line)


def sweep(configs, directory, cluster, witness=None, **options):
    return sweep_on_nodes(configs, directory, witness or Witness(), cluster.connect, **options)


def hosts(cluster):
    return Counter(name for name, _ in cluster.starts)


def scale(directory, num_runs, num_nodes, seed):
    """A sweep in which one machine in ten dies, one in twenty comes later; its cluster, outcome and CPU seconds."""
    draw = random.Random(seed)
    configs, machines = grid(num_runs), [node(number) for number in range(num_nodes)]
    late = num_nodes // 20
    cluster = Cluster(machines[late:], drawn(seed))
    whole_s = num_runs / num_nodes * 60
    for machine in machines[:late]:
        cluster.at(draw.uniform(0, 0.5) * whole_s, Joined(machine))
    deaths = {machine.name: draw.uniform(0.1, 0.9) * whole_s for machine in machines[late : late + num_nodes // 10]}
    for name, when_s in deaths.items():
        cluster.at(when_s, Left(name, "it died"))
    began = time.process_time()
    outcome = sweep(configs, directory, cluster)
    return cluster, outcome, time.process_time() - began - cluster.cpu_s, deaths


def capacity_s(cluster, deaths):
    """Seconds that all machines together were there; one that came late counts from the start."""
    return sum(min(cluster.clock_s, deaths.get(name, cluster.clock_s)) for name in cluster.nodes)


def check_scale(directory, num_runs, num_nodes):
    cluster, outcome, cpu_s, deaths = scale(directory / "a", num_runs, num_nodes, seed=3)
    assert len(outcome.records) == num_runs
    assert all(record.status is Status.OK for record in outcome.records)
    tries = Counter(config.key for _, config in cluster.starts)
    assert set(tries) == {record.key for record in outcome.records}
    assert {record.key: len(record.lost_tries) + 1 for record in outcome.records} == tries
    assert any(count > 1 for count in tries.values())
    ideal_s = cluster.clock_s * cluster.work_s / capacity_s(cluster, deaths)
    assert cluster.clock_s <= 1.10 * ideal_s
    return cluster, cpu_s


def test_a_grid_on_simulated_machines_that_come_and_die(tmp_path):
    first, _ = check_scale(tmp_path, 600, 20)
    again, *_ = scale(tmp_path / "b", 600, 20, seed=3)
    assert again.starts == first.starts
    other, *_ = scale(tmp_path / "c", 600, 20, seed=4)
    assert other.starts != first.starts


@pytest.mark.speed
def test_ten_thousand_runs_on_two_hundred_machines(tmp_path):
    _, cpu_s = check_scale(tmp_path, 10_000, 200)
    assert cpu_s < 0.010 * 10_000


@pytest.mark.usefixtures("ctrl_c_is_heard")
def test_a_sweep_that_was_interrupted_goes_on(tmp_path):
    class Interrupting(Cluster):
        interrupted = False

        def events(self, timeout_s):
            if len(self.starts) >= 9 and not self.interrupted:
                self.interrupted = True
                signal.raise_signal(signal.SIGINT)
            return super().events(timeout_s)

    configs = grid(12)
    first = sweep(configs, tmp_path, Interrupting([node(0), node(1)]))
    assert first.interrupted
    assert 0 < len(first.records) < 12
    written = {path: path.read_bytes() for path in (tmp_path / "runs").iterdir()}
    cluster = Cluster([node(2)])
    second = sweep(configs, tmp_path, cluster)
    assert not second.interrupted
    assert len(cluster.starts) == 12 - len(first.records)
    assert len(second.records) == 12
    assert {path: path.read_bytes() for path in written} == written


def test_a_run_whose_machines_die_fails_the_third_time(tmp_path):
    bad = grid(5)[2]
    cluster = Cluster([node(number) for number in range(4)], lambda config: 1e6 if config == bad else 1.0)

    def start(name, config):
        Cluster.start(cluster, name, config)
        if config == bad:
            cluster.at(cluster.clock_s + 0.5, Left(name, "it ran out of memory"))

    cluster.start = start
    outcome = sweep(grid(5), tmp_path, cluster)
    assert {record.key: record.status for record in outcome.records} == {
        config.key: Status.KILLED if config == bad else Status.OK for config in grid(5)
    }
    failed = next(record for record in outcome.records if record.config == bad)
    tried = [name for name, config in cluster.starts if config == bad]
    assert len(tried) == len(set(tried)) == 3
    assert all(f"host-{name[-1]}: it ran out of memory" in failed.failure.message for name in tried)


def test_a_machine_that_does_not_answer_is_given_up_and_its_late_answer_ignored(tmp_path):
    configs = grid(6)
    hangs = {configs[0].key}

    def duration(config):
        return 150.0 if config.key in hangs and not hangs.discard(config.key) else 1.0

    cluster = Cluster([node(0), node(1)], duration)
    cluster.at(140.0, Answer("node-0", configs[0].key, b"late"))
    witness = Witness()
    outcome = sweep(configs, tmp_path, cluster, witness, timeout_s=30.0)
    assert cluster.given_up == ["node-0"]
    assert [record.key for record in witness.finished_records].count(configs[0].key) == 1
    assert len(outcome.records) == 6
    again = next(record for record in outcome.records if record.key == configs[0].key)
    assert again.status is Status.OK
    assert len(again.lost_tries) == 1
    assert "host-0" in again.lost_tries[0]


ANSWERS = {
    "nothing": lambda config: b"",
    "half a record": lambda config: encode_record(record_of(config))[:200],
    "a pickle": lambda config: b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR.",
    "the record of another run": lambda config: encode_record(record_of(replace(config, seed=99))),
    "a deep list": lambda config: b"[" * 100_000,
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_what_a_machine_returns_is_checked_like_any_file(tmp_path, answer):
    configs = grid(3)
    cluster = Cluster(
        [node(0)],
        answer=lambda config, _: answer(config) if config == configs[1] else encode_record(record_of(config)),
    )
    outcome = sweep(configs, tmp_path, cluster)
    bad = next(record for record in outcome.records if record.config == configs[1])
    assert bad.status is Status.INVALID
    assert (tmp_path / "runs" / f"{bad.key}.json.invalid").read_bytes() == answer(configs[1])
    assert sum(record.status is Status.OK for record in outcome.records) == 2
    assert load_records(tmp_path / "runs")[1] == []


def test_a_machine_with_another_version_is_told_so_and_used_only_if_mixed(tmp_path):
    machines = [node(0), node(1), node(2, torch="2.12.0")]
    cluster, witness = Cluster(machines), Witness()
    sweep(grid(6), tmp_path / "strict", cluster, witness)
    assert set(hosts(cluster)) == {"node-0", "node-1"}
    assert cluster.given_up == ["node-2"]
    assert any("host-2" in line and "2.12.0" in line and "2.13.0" in line for line in witness.notes)
    mixed = Cluster(machines)
    sweep(grid(6), tmp_path / "mixed", mixed, allow_mixed=True)
    assert set(hosts(mixed)) == {"node-0", "node-1", "node-2"}


def test_machines_that_were_lost_or_refused_come_back(tmp_path):
    cluster = Cluster([node(0), node(1), node(2, torch="2.12.0")], lambda config: 2.0)
    for when_s, event in [
        (3.0, Left("node-1", "it died")),
        (9.0, Joined(replace(node(1), name="node-1/1"))), (9.0, Joined(replace(node(2), name="node-2/1"))),
    ]:  # fmt: skip
        cluster.at(when_s, event)
    outcome = sweep(grid(30), tmp_path, cluster)
    assert all(record.status is Status.OK for record in outcome.records)
    assert set(hosts(cluster)) == {"node-0", "node-1", "node-1/1", "node-2/1"}


@pytest.mark.parametrize("seed", range(5))
def test_a_look_at_the_cluster_says_what_a_sweep_then_does(tmp_path, seed):
    draw = random.Random(seed)
    changes = [{}, {"torch": "2.12.0"}, {"driver": "535.2"}, {"device_name": "NVIDIA H100"}]
    machines = [
        node(number, draw.randint(1, 4), has_nsys=draw.random() < 0.7, **draw.choice(changes)) for number in range(8)
    ]
    required, needs_nsys = draw.choice([None, "h200"]), draw.random() < 0.5
    profiler = Profiler.NSYS if needs_nsys else Profiler.NONE
    configs = [replace(config, device=Device.CUDA, profiler=profiler) for config in grid(40)]
    cluster, witness = Cluster(machines), Witness()
    sweep(configs, tmp_path, cluster, witness, require_device=required)
    look = Look(device=Device.CUDA, machines=tuple(map(simulated.machine, machines)))
    foretold = refusals(look, Conditions(require_device=required, needs_nsys=needs_nsys))
    assert set(hosts(cluster)) == {name for name, why in foretold.items() if why is None}
    assert {f"{each.host} is not used: {why}" for each in machines if (why := foretold[each.name])} <= {*witness.notes}


def test_a_machine_without_nsys_is_used_unless_a_run_is_profiled_by_it(tmp_path):
    """Also where most machines have none, and where machines may be mixed."""
    machines = [node(0, slots=4, has_nsys=False), node(1), node(2, slots=4, has_nsys=False)]
    plain = [replace(config, device=Device.CUDA) for config in grid(30)]
    profiled = [replace(config, profiler=Profiler.NSYS) for config in plain]
    for name, configs, used in (("a", plain, {0, 1, 2}), ("b", [*plain[:3], profiled[3]], {1})):
        for allow_mixed in (False, True):
            cluster, witness = Cluster(machines), Witness()
            directory = tmp_path / f"{name}{allow_mixed}"
            outcome = sweep(configs, directory, cluster, witness, allow_mixed=allow_mixed)
            assert len(outcome.records) == len(configs)
            assert set(hosts(cluster)) == {f"node-{number}" for number in used}
            told = [line.split()[0] for line in witness.notes if "nsys" in line]
            assert told == [f"host-{number}" for number in range(3) if number not in used]


def test_records_of_an_earlier_sweep_decide_which_machines_may_go_on(tmp_path):
    old = replace(IDENTITY, torch="2.12.0")
    answer = lambda config, machine: encode_record(record_of(config, machine.identity))  # noqa: E731
    sweep(grid(2), tmp_path, Cluster([node(0, torch="2.12.0")], answer=answer))
    cluster = Cluster([node(1), node(2), node(3, torch="2.12.0")], answer=answer)
    outcome = sweep(grid(4), tmp_path, cluster)
    assert set(hosts(cluster)) == {"node-3"}
    assert {record.environment.identity for record in outcome.records} == {old}


def test_repeats_stay_on_one_kind_of_machine(tmp_path):
    machines = [node(0), node(1, device_name="NVIDIA H100"), node(2), node(3, device_name="NVIDIA H100")]
    cluster = Cluster(machines, drawn(5))
    sweep(grid(40, repeats=5), tmp_path, cluster, allow_mixed=True)
    kinds = {}
    for name, config in cluster.starts:
        kinds.setdefault(config.seed, set()).add(cluster.nodes[name].identity)
    assert all(len(found) == 1 for found in kinds.values())
    assert len(set().union(*kinds.values())) == 2


def families(starts):
    """By the seed of each configuration, the machines on which it was started."""
    found = {}
    for name, config in starts:
        found.setdefault(config.seed, []).append(name)
    return found


def test_repeats_stay_on_one_machine_if_asked_for(tmp_path):
    configs, placement = grid(60, repeats=5), Placement(same_node=True)
    machines = [node(number, slots=2) for number in range(4)]
    cluster = Cluster(machines, drawn(6))
    cluster.at(90.0, Left("node-2", "it died"))
    sweep(configs, tmp_path / "a", cluster, placement=placement)
    found = families(cluster.starts)
    lost = {seed for seed, names in found.items() if "node-2" in names}
    assert 0 < len(lost) < len(found)
    for seed, names in found.items():
        assert len(set(names) - {"node-2"}) == 1 or (seed in lost and set(names) == {"node-2"})
        assert [*dict.fromkeys(names)] == sorted(dict.fromkeys(names), key=lambda name: name != "node-2")
    assert len({name for names in found.values() for name in names}) == 4
    spread = Cluster(machines, drawn(6))
    sweep(configs, tmp_path / "b", spread)
    assert any(len(set(names)) > 1 for names in families(spread.starts).values())


def test_repeats_go_on_where_an_earlier_sweep_measured_them(tmp_path):
    def answer(config, machine):
        record = record_of(config)
        return encode_record(replace(record, environment=replace(record.environment, host=machine.host)))

    configs, placement = grid(40, repeats=4), Placement(same_node=True)
    machines = [node(number) for number in range(4)]
    first = Cluster(machines, answer=answer)
    sweep([config for config in configs if config.repeat < 2], tmp_path, first, placement=placement)
    second = Cluster(machines[:0:-1], drawn(8), answer=answer)
    sweep(configs, tmp_path, second, placement=placement)
    before, after = families(first.starts), families(second.starts)
    for seed, names in after.items():
        assert len(set(names)) == 1
        assert set(names) == set(before[seed]) or set(before[seed]) == {"node-0"}


def limited(config, machine):
    """The record of a run that the CPU limits if its seed is even."""
    warning = RunWarning(code=WarningCode.LAUNCH_BOUND, message="the CPU is the limit")
    return encode_record(replace(record_of(config), warnings=(warning,) * (config.seed % 2 == 0)))


def overlaps(cluster):
    """For each run that was started, in that order, the keys of those on the same machine in its time."""
    spans = [(name, config.key, *span) for (name, config), span in zip(cluster.starts, cluster.spans, strict=True)]
    return [
        (
            key,
            {other for place, other, began, ended in spans if place == name and began < end and start < ended} - {key},
        )
        for name, key, start, end in spans
    ]


class Timed(Cluster):
    """Remembers when each run was started and when it ends."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.spans = []

    def start(self, name, config):
        self.spans.append((self.clock_s, self.clock_s + self.duration(config)))
        super().start(name, config)


@pytest.mark.parametrize("share", [False, True])
def test_a_run_that_the_cpu_limits_has_a_machine_to_itself_unless_it_may_share(tmp_path, share):
    configs = [replace(config, device=Device.CUDA) for config in grid(48, repeats=3)]
    cluster = Timed([node(0, slots=4), node(1, slots=3)], drawn(9), answer=limited)
    outcome = sweep(configs, tmp_path, cluster, placement=Placement(share_nodes=share))
    last = dict(overlaps(cluster))  # of several tries, the last
    assert len(outcome.records) == 48
    for record in outcome.records:
        assert set(record.neighbours) == last[record.key]
        is_limited, is_doubted = (
            record.config.seed % 2 == 0,
            WarningCode.CPU_SHARED in {each.code for each in record.warnings},
        )
        assert is_doubted == (is_limited and bool(record.neighbours))
        assert share or not (is_limited and record.neighbours)
    assert any(record.neighbours for record in outcome.records)
    again = len(cluster.starts) - 48
    assert again == 0 if share else 0 < again <= 24
    if not share:  # an earlier sweep's records say which configurations these are
        more = [replace(config, repeat=3) for config in configs if config.repeat == 0]
        second = Timed([node(0, slots=4)], drawn(9), answer=limited)
        sweep([*configs, *more], tmp_path, second)
        assert len(second.starts) == len(more)


def test_only_the_device_that_is_required(tmp_path):
    cluster = Cluster([node(0), node(1, device_name="NVIDIA H100"), node(2)])
    sweep(grid(4), tmp_path, cluster, require_device="h100")
    assert set(hosts(cluster)) == {"node-1"}


def test_a_run_on_several_gpus_waits_for_one_machine_that_has_them(tmp_path):
    narrow = [replace(config, device=Device.CUDA) for config in grid(30)]
    wide = [replace(config, parallel=Parallel.DDP, ranks=4) for config in narrow[10:13]]
    cluster = Cluster([node(0, slots=4), node(1, slots=2), node(2, slots=4)], drawn(7))
    outcome = sweep([*narrow[:10], *wide, *narrow[13:]], tmp_path, cluster)
    assert all(record.status is Status.OK for record in outcome.records)
    assert {name for name, config in cluster.starts if config.ranks == 4} <= {"node-0", "node-2"}


def test_no_machine_for_too_long_ends_the_sweep_and_keeps_what_is_done(tmp_path):
    cluster = Cluster([node(0)])
    cluster.at(2.5, Left("node-0", "it died"))
    with pytest.raises(SweepError, match=r"1[78] runs left within 20 s.*found none"):
        sweep(grid(20), tmp_path, cluster, wait_nodes_s=20.0)
    assert cluster.clock_s < 25
    kept, problems = load_records(tmp_path / "runs")
    assert len(kept) == 2
    assert problems == []


def test_a_machine_that_comes_while_the_sweep_waits(tmp_path):
    cluster, witness = Cluster([]), Witness()
    cluster.at(1.0, Unfit("host-8", "no such file"))
    cluster.at(19.0, Joined(node(9)))
    outcome = sweep(grid(2), tmp_path, cluster, witness, wait_nodes_s=20.0)
    assert len(outcome.records) == 2
    assert "host-8 is not used: no such file" in witness.notes


def test_it_says_how_the_machines_stand_and_how_long_it_waits(tmp_path):
    """One machine from 10 s to 30 s, two more ordered at 5 s, of which one comes at 50 s."""
    cluster, witness = Cluster([], lambda config: 4.0), Witness()
    told = Cluster.events
    cluster.events = lambda timeout_s: told(cluster, min(timeout_s, 1.0))
    for when_s, event in [
        (5.0, Pending(2)), (10.0, Joined(node(0))), (30.0, Left("node-0", "it died")),
        (50.0, Joined(node(1))), (50.0, Pending(1)),
    ]:  # fmt: skip
        cluster.at(when_s, event)
    when_s = []
    witness.machines = lambda now: (when_s.append(cluster.clock_s), witness.moments.append(now))
    outcome = sweep(grid(10), tmp_path, cluster, witness, wait_nodes_s=25.0)
    assert len(outcome.records) == 10
    at = dict(zip(when_s, witness.moments, strict=True))
    assert [(at[s].there, at[s].pending, at[s].running) for s in (1, 6, 12, 40, 51)] == [
        (0, 0, 0), (0, 2, 0), (1, 2, 1), (0, 2, 0), (1, 1, 1),
    ]  # fmt: skip
    assert [at[s].patience_s for s in (6, 12, 51)] == [19.0, None, None]
    assert witness.moments[-1].patience_s is None
    assert at[40].patience_s == pytest.approx(15.0, abs=1.0)
    waiting = Cluster([])
    waiting.at(1.0, Pending(1))
    with pytest.raises(SweepError, match="1 pending"):
        sweep(grid(11), tmp_path, waiting, wait_nodes_s=5.0)


def test_a_run_too_wide_for_every_machine(tmp_path):
    config = replace(grid(1)[0], device=Device.CUDA, parallel=Parallel.DDP, ranks=4)
    with pytest.raises(SweepError, match="needed 4"):
        sweep([config], tmp_path, Cluster([node(0, slots=2)]), wait_nodes_s=5.0)


def test_a_damaged_record_is_set_aside_as_in_a_local_sweep(tmp_path):
    configs = grid(2)
    sweep(configs, tmp_path, Cluster([node(0)]))
    path = tmp_path / "runs" / f"{configs[0].key}.json"
    path.write_bytes(path.read_bytes()[:50])
    cluster = Cluster([node(0)])
    outcome = sweep(configs, tmp_path, cluster)
    assert [config for _, config in cluster.starts] == [configs[0]]
    assert len(outcome.records) == 2
    assert path.with_name(f"{path.name}.invalid").exists()
