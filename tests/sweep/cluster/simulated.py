"""A simulated cluster: machines answer after drawn times, die, hang and give nonsense, by a clock of their own."""

import contextlib
import hashlib
import heapq
import random
import time
from collections import Counter
from dataclasses import replace

from cs336_systems.config import ModelConfig, Phase, RunConfig
from cs336_systems.record import Environment, Identity, Measurement, RunRecord, Status, encode_record
from cs336_systems.sweep.cluster.fetch import RawFile
from cs336_systems.sweep.cluster.nodes import Answer, Chunk, Joined, Left, Machine, Node
from cs336_systems.sweep.run import num_slots

IDENTITY = Identity(device_name="NVIDIA H200", driver="570.1", torch="2.13.0", code="0123456789abcdef")
SHAPE = ModelConfig(vocab_size=11, context_length=8, d_model=8, d_ff=16, num_layers=1, num_heads=2)


def grid(count, repeats=1):
    """`count` tiny runs, no two of which are equal."""
    base = RunConfig(size="custom", model=SHAPE, warmup_steps=2, measured_steps=2)
    return [replace(base, seed=index // repeats, repeat=index % repeats) for index in range(count)]


def node(number, slots=1, has_nsys=True, **changes):
    identity = replace(IDENTITY, **changes)
    return Node(name=f"node-{number}", host=f"host-{number}", identity=identity, slots=slots, has_nsys=has_nsys)


def machine(node, held=0, failure=None, count=None):
    """The node as `cs336 cluster` sees it, of whose GPUs or cores, as many as it has slots, other jobs hold so many."""
    count = node.slots if count is None else count
    return Machine(
        name=node.name, host=node.host, address="192.0.2.1", node=None if failure else node, count=count,
        free=count - held, failure=failure,
    )  # fmt: skip


def record_of(config, identity=IDENTITY):
    times = (Measurement(Phase.FORWARD, (0.1, 0.2)), Measurement(Phase.STEP, (0.1, 0.2)))
    environment = Environment(
        identity=identity, python="3.12", platform="Linux", host="host", cpu="cpu", cpu_count=8, torch_threads=8,
        float32_matmul_precision="highest", package_version="0",
    )  # fmt: skip
    return RunRecord(
        config=config, status=Status.OK, started_at="2026-11-23T00:00:00+00:00", measurements=times,
        environment=environment,
    )  # fmt: skip


def listed(name, content):
    return RawFile(name, len(content), hashlib.sha256(content).hexdigest())


class Cluster:
    """Machines that take `duration(config)` seconds for a run, and `chunk_s` for a part of what its profiler left."""

    def __init__(
        self, nodes, duration=lambda config: 1.0, answer=lambda config, node: encode_record(record_of(config)),
        profile=lambda config: {}, chunk_s=0.25, chunk_bytes=30_000,
    ):  # fmt: skip
        self.duration, self.answer = duration, answer
        self.profile, self.chunk_s, self.chunk_bytes = profile, chunk_s, chunk_bytes
        self.left, self.fetches = {}, []
        self.clock_s, self.cpu_s, self._number = 0.0, 0.0, 0
        self.events_to_come = []
        self.nodes, self.gone = {}, set()
        self.running, self.starts, self.work_s = {}, [], 0.0
        self.given_up = []
        self.busy = Counter()
        for each in nodes:
            self.at(0.0, Joined(each))

    def at(self, when_s, event):
        """The event happens then."""
        self._number += 1
        heapq.heappush(self.events_to_come, (when_s, self._number, event))

    def start(self, name, config):
        began = time.process_time()
        machine = self.nodes[name]
        assert name not in self.gone, "a run is started on a machine that is gone"
        self.busy[name] += num_slots(config)
        assert self.busy[name] <= machine.slots, "more runs on a machine than it has slots"
        self.starts.append((name, config))
        took_s = self.duration(config)
        self.running[name, config.key] = config, took_s
        if took_s != float("inf"):
            files = self.profile(config)
            self.left[name, config.key] = files
            answer = Answer(name, config.key, self.answer(config, machine), tuple(map(listed, files, files.values())))
            self.at(self.clock_s + took_s, answer)
        self.cpu_s += time.process_time() - began

    def fetch(self, name, key, file, offset):
        assert name not in self.gone
        self.fetches.append((name, key, file, offset, self.clock_s))
        data = self.left[name, key][file][offset : offset + self.chunk_bytes]
        self.at(self.clock_s + self.chunk_s, Chunk(name, key, file, offset, self.sent(self.fetches[-1], data)))

    def sent(self, asked, data):
        """What comes of a part on the way."""
        return data

    def release(self, name, key):
        del self.left[name, key]

    def give_up(self, name, *, refused=False):
        self.given_up.append(name)
        self.gone.add(name)

    def now_s(self):
        return self.clock_s

    def events(self, timeout_s):
        """All that happens at the next moment at which something does."""
        until_s = self.clock_s + timeout_s
        if not self.events_to_come or self.events_to_come[0][0] > until_s:
            self.clock_s = until_s
            return []
        self.clock_s, found = self.events_to_come[0][0], []
        while self.events_to_come and self.events_to_come[0][0] == self.clock_s:
            event = heapq.heappop(self.events_to_come)[2]
            if self._happens(event):
                found.append(event)
        return found

    def _happens(self, event):
        match event:
            case Joined(each):
                self.nodes[each.name] = each
            case Left(name):
                self.gone.add(name)
            case Chunk(name):
                return name not in self.gone
            case Answer(name, key):
                if name in self.gone:
                    return False
                config, took_s = self.running.pop((name, key))
                self.work_s += took_s
                self.busy[name] -= num_slots(config)
        return True

    @contextlib.contextmanager
    def connect(self, configs, timeout_s):
        yield self


def drawn(seed, mean_s=60.0):
    """How long each run takes, from a third to three times the mean."""
    draw = random.Random(seed)
    times = {}

    def duration(config):
        if config.seed not in times:
            times[config.seed] = mean_s * 3 ** draw.uniform(-1, 1)
        return times[config.seed]

    return duration
