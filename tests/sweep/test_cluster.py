"""The driver of a sweep on a cluster, with a Ray that places and ends tasks at once; and what a
task returns.
"""

import contextlib
import sys
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

pytest.importorskip("ray", reason="needs Ray: pip install ray")

import ray

from cs336.analysis.kernels.explain import explain
from cs336.config import Device, Parallel, Profiler
from cs336.measure import nvml
from cs336.record import Status, encode_record
from cs336.sweep.cluster import connection, driver, machines, task
from cs336.sweep.cluster.driver import sweep_on_cluster
from cs336.sweep.cluster.task import Needs, Node, Reply, Request
from cs336.sweep.keep import Listener
from cs336.sweep.store import SweepError, raw_profile_path
from tests.fake_nvml import fake_driver
from tests.sweep.records import IDENTITY, grid, record_of

OTHER = replace(IDENTITY, torch="2.12.0")


class Witness(Listener):
    def __init__(self):
        self.notes, self.started_runs = [], []

    def noted(self, line):
        self.notes.append(line)

    def started(self, config, gpu):
        self.started_runs.append(config)


def good(config, node):
    """What a task returns whose run has left a record."""
    record = encode_record(record_of(config, node.identity))
    return msgspec.msgpack.encode(Reply(files={f"{config.key}.json": record}))


def name_of(number):
    """Ray's id of a machine."""
    return f"{number:056x}"


class FakeRay:
    """`machines` are pairs of a number of GPUs, or cores, and a description; `answer` is what a
    task gives.
    """

    exceptions = ray.exceptions

    def __init__(self, *machines, answer=good):
        self.machines, self.answer = [*machines], answer
        self.results, self.widths, self.most, self.late = {}, {}, 0, []
        self.hanging, self.places, self.num_died, self.retries, self.lost = (), {}, 0, [], None
        self.experimental = SimpleNamespace(
            internal_kv=SimpleNamespace(
                _internal_kv_get=self.places.get,
                _internal_kv_put=lambda key, place, overwrite: None,
                _internal_kv_del=lambda key, del_by_prefix: None,
            )
        )

    def nodes(self):
        return [
            {
                "NodeID": name_of(number),
                "Alive": number != self.lost or not self.hanging,
                "NodeManagerHostname": f"host-{number}",
                "NodeManagerAddress": "192.0.2.1",
                "NodeManagerPort": 1,
                "Resources": {"GPU": count, "CPU": count},
            }
            for number, (count, _) in enumerate(self.machines)
        ]

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: name_of(0), gcs_address="")

    def remote(self, **_):
        return lambda function: SimpleNamespace(
            options=lambda **options: SimpleNamespace(
                remote=lambda argument: self.submit(function, argument, options)
            )
        )

    def submit(self, function, argument, options):
        reference = len(self.results)
        if function is task.describe:
            node = self.machines[int(options["scheduling_strategy"].node_id, 16)][1]
            self.results[reference] = msgspec.json.encode(node)
            return reference
        # after the driver has looked at all machines
        self.machines, self.late = [*self.machines, *self.late], []
        config, needs = (asked := msgspec.json.decode(argument, type=Request)).config, asked.needs
        out = (options["label_selector"] or {}).get("ray.io/node-id", "")
        fitting = [
            n
            for n, (count, _) in enumerate(self.machines)
            if name_of(n) not in out and count >= config.ranks
        ]
        number = fitting[reference % len(fitting)]
        node = self.machines[number][1]
        self.hanging = (*self.hanging, reference) if number == self.lost else self.hanging
        self.places[asked.key] = " ".join([*[name_of(0)] * self.num_died, name_of(number)]).encode()
        self.retries.append(options["max_retries"])
        why = needs.why_left_out(node)
        reply = msgspec.msgpack.encode(Reply(refused=why)) if why else None
        self.results[reference] = reply or self.answer(config, node)
        self.widths[reference] = options.get("num_gpus", 1)
        self.most = max(self.most, sum(self.widths.values()))
        return reference

    def wait(self, references, num_returns=1, **_):
        ready = [each for each in references if each not in self.hanging][:num_returns]
        return ready, [each for each in references if each not in ready]

    def cancel(self, reference, force):
        assert reference in self.hanging

    def get(self, reference, timeout=None):
        self.widths.pop(reference, None)
        if isinstance(self.results[reference], Exception):
            raise self.results[reference]
        return self.results[reference]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """A sweep on these machines."""

    def start(fake, configs, **options):
        monkeypatch.setattr(driver, "ray", fake)
        monkeypatch.setattr(machines, "ray", fake)
        monkeypatch.setattr(connection, "connected", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(connection, "checked_address", lambda _: None)
        monkeypatch.setattr(driver, "_TICK_S", 0.01)
        witness = Witness()
        outcome = sweep_on_cluster(
            configs,
            tmp_path,
            witness,
            address="auto",
            wait_nodes_s=0.5,
            require_device=None,
            **{"timeout_s": 600.0, "fresh": False, "allow_mixed": False} | options,
        )
        return outcome, witness

    return start


def on_gpus(count, ranks=1):
    return grid(
        count,
        device=Device.CUDA,
        ranks=ranks,
        parallel=Parallel.DDP if ranks > 1 else Parallel.NONE,
    )


def node(identity=IDENTITY, has_nsys=True):
    return Node(identity, has_nsys)


def test_wide_runs_start_first_and_ray_never_has_more_than_there_are_gpus(run):
    fake = FakeRay((4, node()), (2, node()))
    outcome, witness = run(fake, [*on_gpus(9), *on_gpus(3, ranks=4)])
    assert [config.ranks for config in witness.started_runs][:3] == [4, 1, 1]
    assert [record.status for record in outcome.records] == [Status.OK] * 12
    assert fake.most == 6


@pytest.mark.parametrize("allow_mixed", [False, True])
def test_a_machine_unlike_most_is_named_and_left_out_unless_mixed_also_if_it_joins_late(
    run, allow_mixed
):
    fake = FakeRay((1, node(OTHER)), (4, node()))
    fake.late = [(1, node(OTHER))]
    outcome, witness = run(fake, on_gpus(12), allow_mixed=allow_mixed)
    assert len(outcome.records) == 12
    torches = {record.environment.identity.torch for record in outcome.records}
    assert torches == {"2.13.0", *(["2.12.0"] if allow_mixed else [])}
    refused = [line for line in witness.notes if "torch is 2.12.0, needed 2.13.0" in line]
    assert [line.partition(" ")[0] for line in refused] == (
        [] if allow_mixed else ["host-0", "host-2"]
    )


def test_a_machine_that_cannot_be_used_at_the_first_look_is_used_when_it_can_be(run):
    class Recovering(FakeRay):
        looks = 0

        def nodes(self):
            self.looks += 1
            self.machines[0] = (1, node() if self.looks > 2 else None)
            return super().nodes()

    outcome, witness = run(Recovering((1, None)), on_gpus(2))
    assert [record.status for record in outcome.records] == [Status.OK] * 2
    assert any("host-0 is not used: it has no NVIDIA GPU" in line for line in witness.notes)


def test_records_of_an_earlier_sweep_decide_which_machines_go_on(run):
    configs = on_gpus(4)
    run(FakeRay((1, node(OTHER))), configs[:2])
    outcome, witness = run(FakeRay((4, node()), (1, node(OTHER))), configs)
    assert {record.environment.identity for record in outcome.records} == {OTHER}
    assert len(witness.started_runs) == 2


def test_machines_that_lack_what_the_sweep_needs():
    needs = Needs(require_device="h100", nsys=True)
    assert "H200, needed h100" in needs.why_left_out(node())
    fitting = replace(IDENTITY, device_name="NVIDIA H100")
    assert "nsys" in needs.why_left_out(node(fitting, has_nsys=False))
    assert needs.why_left_out(node(fitting)) is None


def test_machines_with_other_numbers_of_cores_do_not_share_them_among_runs(run):
    fake = FakeRay((8, node()), (8, node()), (16, node()), (0, node()))
    _, witness = run(fake, grid(4))
    assert any(
        "host-2 is not used: Ray counts 16 of its cores, needed 8" in line for line in witness.notes
    )


def test_without_a_machine_that_has_the_gpus_the_sweep_ends_and_keeps_what_is_done(run, tmp_path):
    with pytest.raises(SweepError, match=r"the 1 run left .* needed 4 slot"):
        run(FakeRay((2, node())), [*on_gpus(3), *on_gpus(1, ranks=4)])
    assert len([*(tmp_path / "runs").glob("*.json")]) == 3


def test_a_run_whose_machines_die_and_one_for_which_ray_fails_have_rows_that_say_so(run):
    errors = deque(
        [
            ray.exceptions.NodeDiedError("the node is dead"),
            ray.exceptions.OutOfMemoryError("no memory"),
        ]
    )
    fake = FakeRay(
        (1, node()), answer=lambda config, node: errors.popleft() if errors else good(config, node)
    )
    outcome, _ = run(fake, on_gpus(3))
    assert sorted(record.status for record in outcome.records) == [
        Status.KILLED,
        Status.KILLED,
        Status.OK,
    ]
    assert "the node is dead" in outcome.measured[0].failure.message


@pytest.mark.parametrize(
    "answer",
    [
        lambda config: {"not": "bytes"},
        lambda config: b"",
        lambda config: msgspec.msgpack.encode({"refused": 1}),
        lambda config: b"\x81\xa1x" + b"\x91" * 200_000,  # arrays in arrays
        lambda config: msgspec.msgpack.encode(Reply(files={"../../x": b"{}"})),
        lambda config: msgspec.msgpack.encode(Reply()),
    ],
)
def test_an_odd_answer_loses_its_machine_and_no_run(run, tmp_path, answer):
    fake = FakeRay((1, node()), (1, node(has_nsys=False)))
    fake.answer = lambda config, at: good(config, at) if at.has_nsys else answer(config)
    outcome, witness = run(fake, on_gpus(4))
    assert [record.status for record in outcome.records] == [Status.OK] * 4
    assert any("host-1 is not used: no reply of a run" in line for line in witness.notes)
    assert not [
        path for path in (*tmp_path.rglob("x"), *tmp_path.parent.glob("x")) if path.is_file()
    ]


def test_starts_before_a_refusal_are_among_the_three(run):
    fake = FakeRay((1, node()), (1, node(has_nsys=False)))
    fake.num_died = 2
    fake.answer = lambda config, at: good(config, at) if at.has_nsys else b"no reply"
    outcome, _ = run(fake, on_gpus(2))
    assert [record.status for record in outcome.records] == [Status.OK] * 2
    assert fake.retries == [2, 2, 0]


def test_a_run_that_does_not_end_is_given_to_ray_again(run, monkeypatch):
    monkeypatch.setattr(driver, "_SPARE_S", 0.0)
    fake = FakeRay((1, node()), (1, node()))
    fake.hanging = (2,)  # the first run, after two descriptions
    outcome, witness = run(fake, on_gpus(3), timeout_s=0.2)
    assert [record.status for record in outcome.records] == [Status.OK] * 3
    assert len(witness.started_runs) == 4


def test_a_run_of_a_machine_that_hangs_and_is_lost_goes_elsewhere_for_good(run, monkeypatch):
    """Ray would ask the lost machine again, unless it is told to leave it out."""
    monkeypatch.setattr(connection, "RAY_S", 0.5)
    fake = FakeRay((1, node()), (1, node()))
    fake.lost = 1
    outcome, witness = run(fake, on_gpus(3))
    assert [record.status for record in outcome.records] == [Status.OK] * 3
    assert len(witness.started_runs) == 4


def test_a_task_returns_the_profiles_of_two_ranks(monkeypatch, tmp_path):
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    monkeypatch.setattr(task, "when_it_ends", lambda *_: None)
    fake = FakeRay()
    monkeypatch.setattr(task, "ray", fake)
    config = replace(grid(1)[0], profiler=Profiler.KINETO, parallel=Parallel.DDP_FLAT, ranks=2)
    data = task.measure(msgspec.json.encode(Request(config, 60.0, Needs(), "")))
    reply = task.decoded(data, config)
    assert reply.refused is None
    raw = raw_profile_path(config, tmp_path / "runs")
    raw.parent.mkdir()
    for name, content in reply.files.items():
        (raw.parent / name).write_bytes(content)
    explained = explain(raw, config)
    assert [own.rank for own in explained.ranks] == [0, 1]


def test_a_machine_whose_gpus_ray_hides_from_a_task_that_asks_for_none_has_them(monkeypatch):
    """As Ray 2.52 does."""
    fake_driver(monkeypatch)
    monkeypatch.setattr(nvml, "_initialised", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    node = msgspec.json.decode(task.describe("cuda"), type=Node)
    assert node.identity.device_name == "NVIDIA H100 80GB HBM3"
