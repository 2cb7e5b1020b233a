"""The process between the driver of a sweep and Ray: the only one that imports ray, and that its end takes along.

It reads `Command`s from standard input and writes `Message`s to standard output, each a line of JSON. Standard error is
for Ray and for one line that says why it ends. Records pass through it as bytes that nobody has looked into.
"""

import asyncio
import contextlib
import itertools
import os
import queue
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import ray
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import cs336_systems
from cs336_systems.config import Device
from cs336_systems.record import Identity
from cs336_systems.sweep.cluster.agent import LEASE_S, Agent
from cs336_systems.sweep.cluster.fetch import RawFile
from cs336_systems.sweep.cluster.measurer import Description, Request, describe
from cs336_systems.sweep.cluster.messages import MAX_LINE_BYTES, Command, Failed, Message, Part
from cs336_systems.sweep.cluster.nodes import Answer, Chunk, Connected, Joined, Left, Node, Pending, Unfit
from cs336_systems.sweep.process import die_with_forker

_LOOK_S = 3.0
"""How often the cluster is asked for its machines, and their agents are told that the sweep goes on."""
_HEAD_S = 10.0
"""How long the head of the cluster may take to answer."""
_READY_S = 120.0
"""How long a machine may take until it is ready to measure."""
_MAX_AGENTS = 3
"""How many agents may die on a machine that goes on, without a record from it in between, before it is left alone."""
_BACK_S = 6.0
"""How long after the death of an agent another is started on its machine, if that has not died too."""
_AGAIN_S = 20.0
"""How often machines that were left alone are asked whether they can be used again."""
_PARTING_S = 0.5
"""How long the last calls to the agents may take."""


@dataclass(slots=True)
class _Agent:
    actor: Any
    host: str
    heard: bool = False
    """Whether it has answered yet. Until then it may wait for GPUs that another job holds."""
    identity: Identity | None = None
    joined: bool = False
    """Whether the driver knows its machine."""


class _Bridge:
    def __init__(self, device: str, modules: Sequence[str], out: BinaryIO) -> None:
        self._device, self._modules, self._out = device, modules, out
        self._agents: dict[str, _Agent] = {}
        """By name: the id of the machine, and a number, because another may follow."""
        self._numbers = itertools.count()
        self._seen: set[str] = set()
        """Ids of machines that need no further agent."""
        self._died: Counter[str] = Counter()
        """How many agents have died on each machine since the last record from it."""
        self._away: dict[str, Identity | None] = {}
        """Ids of machines that may join again, with what each was like if the driver refused it for that."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._speaker = threading.Thread(target=self._speak, daemon=True)
        self._speaker.start()

    def say(self, message: Message) -> None:
        """Send the message as soon as the driver reads, which may write to a slow disk: agents do not wait for that."""
        self._messages.put(message)

    def _speak(self) -> None:
        while (message := self._messages.get()) is not None:
            self._out.write(msgspec.json.encode(message) + b"\n")
            self._out.flush()

    def end(self) -> None:
        """End this process once everything has been said, if the driver listens."""
        self._messages.put(None)
        self._speaker.join(_PARTING_S)
        os._exit(0)

    async def serve(self) -> None:
        """Watch the cluster and obey the driver until either is gone."""
        loop = asyncio.get_running_loop()
        lines = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        self._spawn(self._renew())
        self._spawn(self._count_pending())
        self._spawn(self._look_again())
        watching = asyncio.create_task(self._watch())
        obeying = asyncio.create_task(self._obey(lines))
        done, _ = await asyncio.wait({watching, obeying}, return_when=asyncio.FIRST_COMPLETED)
        if watching in done:
            error = watching.exception()
            silent = isinstance(error, TimeoutError)
            why = f"its head did not answer within {_HEAD_S:g} s" if silent else in_a_line(error)
            self.say(Message(failed=Failed(why)))
        for agent in self._agents.values():
            agent.actor.end.remote()  # without a head, Ray does not end them
        await asyncio.sleep(_PARTING_S)
        self.end()  # in order, Python could wait for a head that is gone

    async def _obey(self, lines: asyncio.StreamReader) -> None:
        while line := await lines.readline():
            command = msgspec.json.decode(line, type=Command)
            agent = self._agents.get(command.name)
            if agent is None:
                continue
            if command.part is not None:
                self._send(command.name, agent, command.part)
            elif command.run is None:
                self._agents.pop(command.name)
                self._kill(agent)
                self._expect_back(_machine(command.name), agent.identity if command.refused else None)
            else:
                reference = agent.actor.measure.remote(msgspec.json.encode(command.run), command.width)
                self._spawn(self._answer(command.name, command.run, reference))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, name: str, run: Request, reference: Any) -> None:  # noqa: ANN401
        try:
            reply = msgspec.json.decode(await reference, type=_RawReply)
        except ray.exceptions.RayError as error:
            await self._lose(name, error)
            return
        except msgspec.DecodeError as error:
            self._leave(name, in_a_line(error))
            return
        if not bytes(reply.record):
            self._leave(name, reply.error or "it gave no record")
        elif name in self._agents:
            self._died.pop(_machine(name), None)
            self.say(Message(answer=Answer(name, run.config.key, bytes(reply.record), reply.files)))

    def _send(self, name: str, agent: _Agent, part: Part) -> None:
        if part.file is None:
            agent.actor.release.remote(part.key)
        else:
            reference = agent.actor.fetch.remote(part.key, part.file, part.offset)
            self._spawn(self._chunk(name, part.key, part.file, part.offset, reference))

    async def _chunk(self, name: str, key: str, file: str, offset: int, reference: Any) -> None:  # noqa: ANN401
        try:
            data = await reference
        except ray.exceptions.RayError as error:
            await self._lose(name, error)
            return
        if name in self._agents:
            self.say(Message(chunk=Chunk(name, key, file, offset, data if isinstance(data, bytes) else b"")))

    def _leave(self, name: str, why: str, *, may_return: bool = True) -> None:
        """Use the machine no more for now, and say why."""
        agent = self._agents.pop(name, None)
        if agent is not None:
            if may_return:
                self._expect_back(_machine(name), None)
            self._kill(agent)
            self.say(Message(left=Left(name, why)) if agent.joined else Message(unfit=Unfit(agent.host, why)))

    async def _lose(self, name: str, error: ray.exceptions.RayError) -> None:
        """Report that the agent is gone. If its machine is still there later, another is started on it."""
        with contextlib.suppress(TimeoutError):
            alive = await asyncio.wait_for(asyncio.to_thread(machines), _HEAD_S)
            if ray.get_runtime_context().get_node_id() not in alive:
                return  # all agents die because Ray has died here, as the next look finds: no run loses a try
        if name in self._agents:
            self._leave(name, in_a_line(error), may_return=False)
            machine = _machine(name)
            self._died[machine] += 1
            if self._died[machine] < _MAX_AGENTS:
                asyncio.get_running_loop().call_later(_BACK_S, self._seen.discard, machine)

    def _expect_back(self, machine: str, refused: Identity | None) -> None:
        """Let the machine join again when it can be used: if it was refused, as another; if it failed, not for ever."""
        self._died[machine] += refused is None
        if self._died[machine] < _MAX_AGENTS:
            self._away[machine] = refused

    async def _look_again(self) -> None:
        reserved = "GPU" if self._device == "cuda" else "CPU"
        while True:
            await asyncio.sleep(_AGAIN_S)
            if self._away:
                with contextlib.suppress(ray.exceptions.RayError):  # the head; it is watched elsewhere
                    alive, free = await asyncio.to_thread(lambda: (machines(), free_resources()))
                    away = {machine: refused for machine, refused in self._away.items() if machine in alive}
                    self._away = away
                    are_free = [
                        machine for machine in away
                        if free[machine].get(reserved) == alive[machine]["Resources"].get(reserved)
                    ]  # fmt: skip
                    await asyncio.gather(*(self._return(machine, away[machine]) for machine in are_free))

    async def _return(self, machine: str, refused: Identity | None) -> None:
        """Let the machine join again if it answers, and is not still as it was when it was refused."""
        with contextlib.suppress(TimeoutError, ray.exceptions.RayError, msgspec.DecodeError):
            line = await asyncio.wait_for(ask(machine, Device(self._device)), _READY_S)
            found = msgspec.json.decode(line, type=Description | None)
            if found is not None and found.identity != refused:
                self._away.pop(machine, None)
                self._seen.discard(machine)

    def _kill(self, agent: _Agent) -> None:
        async def kill() -> None:
            with contextlib.suppress(ray.exceptions.RayError):
                await asyncio.to_thread(ray.kill, agent.actor)  # which waits for the head

        self._spawn(kill())

    async def _watch(self) -> None:
        """Start an agent on each machine that is new, and report those that are gone; raise OSError if this one is."""
        this = ray.get_runtime_context().get_node_id()
        while True:
            alive = await asyncio.wait_for(asyncio.to_thread(machines), _HEAD_S)
            if this not in alive:
                raise OSError("Ray has died on this machine, and takes along what was started from here")
            joining = [
                self._join(f"{machine}/{next(self._numbers)}", facts)
                for machine, facts in alive.items()
                if machine not in self._seen
            ]
            if not self._seen:  # the first ones come together, because they decide which others fit
                self._spawn(self._join_first(joining))
            else:
                for each in joining:
                    self._spawn(each)
            self._seen.update(alive)
            for name in [*self._agents]:
                if _machine(name) not in alive:
                    self._leave(name, "Ray says that the machine is dead", may_return=False)
            await asyncio.sleep(_LOOK_S)

    async def _count_pending(self) -> None:
        """Say how many machines the autoscaler has ordered, whenever that changes; without one, none."""
        told = 0
        while True:
            with contextlib.suppress(Exception):  # part of Ray that not every cluster has, and that may change
                status = await asyncio.to_thread(get_cluster_status, ray.get_runtime_context().gcs_address)
                count = len(status.pending_nodes) + sum(launch.count for launch in status.pending_launches)
                if count != told:
                    told = count
                    self.say(Message(pending=Pending(count)))
            await asyncio.sleep(_LOOK_S)

    async def _renew(self) -> None:
        while True:
            for name, agent in self._agents.items():
                self._spawn(self._hear(name, agent))
            await asyncio.sleep(_LOOK_S)

    async def _hear(self, name: str, agent: _Agent) -> None:
        """Use the machine no more if its agent does not answer; the agent ends, if it can, because it hears nothing."""
        try:
            await asyncio.wait_for(agent.actor.renew.remote(), LEASE_S)
            agent.heard = True
        except TimeoutError:
            if agent.heard:
                self._leave(name, f"it has not answered for {LEASE_S:g} s")
        except ray.exceptions.RayError as error:
            await self._lose(name, error)

    async def _join_first(self, joining: Sequence[Coroutine[Any, Any, None]]) -> None:
        await asyncio.gather(*joining)
        self.say(Message())

    async def _join(self, name: str, machine: dict[str, Any]) -> None:
        num_gpus = machine["Resources"].get("GPU", 0) if self._device == "cuda" else 0
        host = str(machine["NodeManagerHostname"])
        if self._device == "cuda" and not num_gpus:
            return  # such as a head without a GPU
        num_cpus = machine["Resources"].get("CPU", 0) if self._device == "cpu" else 0
        options = {
            "num_cpus": num_cpus, "num_gpus": num_gpus, "max_restarts": 0, "max_concurrency": max(1, int(num_gpus)) + 1,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(_machine(name), soft=False),
        }  # fmt: skip
        actor = ray.remote(Agent).options(**options).remote(self._device, self._modules)
        agent = self._agents[name] = _Agent(actor, host)
        try:
            line = await asyncio.wait_for(actor.describe.remote(), _READY_S)
            found = msgspec.json.decode(line, type=Description)
        except TimeoutError:
            self._leave(name, f"not ready within {_READY_S:g} s; if other jobs hold its GPUs or cores, wait for them")
        except ray.exceptions.RayError as error:
            await self._lose(name, error)
        except msgspec.DecodeError:
            self._leave(name, msgspec.json.decode(line, type=_RawReply).error or "it does not describe itself")
        else:
            if name in self._agents:
                agent.joined, agent.identity = True, found.identity
                slots = len(found.gpus) or 1
                node = Node(name=name, host=found.host, identity=found.identity, slots=slots)
                self.say(Message(joined=Joined(node)))


class _RawReply(msgspec.Struct):
    record: msgspec.Raw = msgspec.Raw()
    """Its bytes as they are, or none."""
    error: str | None = None
    files: tuple[RawFile, ...] = ()


def _machine(name: str) -> str:
    return name.partition("/")[0]


def machines() -> dict[str, dict[str, Any]]:
    """What Ray says of each machine that is alive, by its id."""
    return {machine["NodeID"]: machine for machine in ray.nodes() if machine["Alive"]}


def free_resources() -> dict[str, dict[str, float]]:
    """What no job has reserved of each machine, by its id."""
    found: dict[str, dict[str, float]] = ray._private.state.available_resources_per_node()
    return found


def ask(machine: str, device: Device) -> "ray.ObjectRef[bytes]":
    """Have a new process on the machine describe it, which takes none of its GPUs."""
    options = {
        "num_cpus": 0, "num_gpus": 0, "max_retries": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(machine, soft=False),
        # Ray before 2.51 hides the GPUs from a task that takes none
        "runtime_env": {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}},
    }  # fmt: skip
    return ray.remote(max_calls=1)(describe).options(**options).remote(device.value)


def in_a_line(error: BaseException | None) -> str:
    """What went wrong, in the first line of what Ray says, or in plainer words."""
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return "Ray cannot reach it any more"
    if isinstance(error, ray.exceptions.RayActorError):
        return "the machine died, or the agent on it"
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def connect(address: str) -> str:
    """Connect to the cluster at this address and return the directory of its logs; raise OSError if it is not there."""
    if address == "auto":
        address = _this_cluster()
    _check_address(address)
    context = ray.init(
        address=address,
        configure_logging=False,
        log_to_driver=False,
        runtime_env={"py_modules": [str(Path(cs336_systems.__file__).parent)]},
    )
    return str(Path(context["session_dir"]) / "logs")


def _this_cluster() -> str:
    """The address of the cluster that this machine belongs to; it may have died, as Ray keeps its last address."""
    try:
        return str(canonicalize_bootstrap_address_or_die("auto"))
    except ConnectionError:
        raise OSError("this machine belongs to none; `ray start` makes it part of one") from None


def _check_address(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT, for which Ray would wait a minute."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _HEAD_S).close()
    except OSError as error:
        raise OSError(f"nothing listens at {address} ({error.strerror or error})") from error


def main(words: Sequence[str]) -> None:
    """Serve the driver `words[0]` with the cluster at `words[1]`: device `words[2]`, modules to preload `words[3:]`."""
    die_with_forker(signal.SIGKILL)  # by the kernel, since Ray can hold Python's lock while it waits
    if os.getppid() != int(words[0]):
        os._exit(1)  # the driver has ended already
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    bridge = _Bridge(words[2], words[3:], out)
    try:
        bridge.say(Message(connected=Connected(connect(words[1]))))
        asyncio.run(bridge.serve())
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        bridge.say(Message(failed=Failed(in_a_line(error))))
    bridge.end()


if __name__ == "__main__":
    main(sys.argv[1:])
