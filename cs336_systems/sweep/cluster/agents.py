"""The agents of a sweep on the machines of a Ray cluster: starts them, sends requests, and notices losses."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

import msgspec
import ray

from cs336_systems.config import Device
from cs336_systems.sweep.cluster.connection import (
    ask,
    free_resources,
    in_a_line,
    machines,
    resource_of,
    start_agent,
    this_machine,
)
from cs336_systems.sweep.cluster.fetch import RawFile
from cs336_systems.sweep.cluster.measurer import Description, Request
from cs336_systems.sweep.cluster.messages import Command, Message, Part
from cs336_systems.sweep.cluster.nodes import Answer, Chunk, Joined, Left, Unfit
from cs336_systems.sweep.cluster.patience import Patience
from cs336_systems.sweep.cluster.roster import Member, Roster, machine_of


class _RawReply(msgspec.Struct):
    record: msgspec.Raw = msgspec.Raw()
    """The record's JSON, undecoded; empty if there is none."""
    error: str | None = None
    files: tuple[RawFile, ...] = ()


class Agents:
    """Starts agents, passes on what the driver orders and what they answer, and notices those that are lost.

    `say` sends a message to the driver, and `spawn` starts a task beside the others.
    """

    def __init__(
        self,
        device: Device,
        modules: Sequence[str],
        patience: Patience,
        say: Callable[[Message], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._device, self._modules, self._patience = device, modules, patience
        self._say, self._spawn = say, spawn
        self._roster = Roster()
        self._resource = resource_of(device)
        """Name of the resource that an agent reserves on its machine."""

    def obey(self, command: Command) -> None:
        """Do what the driver orders. For a machine that is lost, do nothing: the driver is told of the loss anyway."""
        member = self._roster.members.get(command.name)
        if member is None:
            return
        if command.run is not None:
            reference = member.actor.measure.remote(msgspec.json.encode(command.run))
            self._spawn(self._answer(command.name, command.run, reference))
        elif command.part is None:
            self._end(command.name)
            self._roster.expect_back(command.name, member.description if command.refused else None)
        elif command.part.file is None:
            member.actor.release.remote(command.part.key)
        else:
            reference = member.actor.fetch.remote(command.part.key, command.part.file, command.part.offset)
            self._spawn(self._chunk(command.name, command.part, command.part.file, reference))

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
        elif name in self._roster.members:
            self._roster.has_measured(name)
            self._say(Message(answer=Answer(name, run.config.key, bytes(reply.record), reply.files)))

    async def _chunk(self, name: str, part: Part, file: str, reference: Any) -> None:  # noqa: ANN401
        try:
            data = await reference
        except ray.exceptions.RayError as error:
            await self._lose(name, error)
            return
        if name in self._roster.members:
            chunk = Chunk(name, part.key, file, part.offset, data if isinstance(data, bytes) else b"")
            self._say(Message(chunk=chunk))

    def update(self, alive: dict[str, dict[str, Any]]) -> None:
        """Start an agent on each machine that is new among those `alive`, and give up those on machines that are not.

        The first agents are reported together, because the driver chooses the conditions of its sweep by them.
        """
        is_first = self._roster.is_empty
        joining = [self._join(name, alive[machine_of(name)]) for name in self._roster.newcomers(alive)]
        if is_first:
            self._spawn(self._join_first(joining))
        else:
            for each in joining:
                self._spawn(each)
        for name in self._roster.gone(alive):
            self._leave(name, "Ray says that the machine is dead", may_return=False)

    async def _join_first(self, joining: Collection[Coroutine[Any, Any, None]]) -> None:
        await asyncio.gather(*joining)
        self._say(Message())

    async def _join(self, name: str, machine: dict[str, Any]) -> None:
        count = machine["Resources"].get(self._resource, 0)
        if not count:
            return  # such as a head without a GPU, or one that was started with --num-cpus=0
        counts = (0, count) if self._device is Device.CUDA else (count, 0)
        arguments = (self._device.value, self._modules, self._patience.lease_s)
        actor = start_agent(machine_of(name), *counts, *arguments)
        member = self._roster.members[name] = Member(str(machine["NodeManagerHostname"]), actor)
        try:
            line = await asyncio.wait_for(actor.describe.remote(), self._patience.ready_s)
            found = msgspec.json.decode(line, type=Description)
        except TimeoutError:
            what = "GPUs" if self._device is Device.CUDA else "cores"
            why = f"not ready within {self._patience.ready_s:g} s; if other jobs hold its {what}, wait for them"
            self._leave(name, why)
        except ray.exceptions.RayError as error:
            await self._lose(name, error)
        except msgspec.DecodeError:
            self._leave(name, _why_not_described(line))
        else:
            if name in self._roster.members:
                member.description = found
                self._say(Message(joined=Joined(found.node(name))))

    async def renew(self) -> None:
        """Renew the leases of all agents periodically."""
        while True:
            for name, member in self._roster.members.items():
                self._spawn(self._hear(name, member))
            await asyncio.sleep(self._patience.look_s)

    async def _hear(self, name: str, member: Member) -> None:
        """Renew one agent's lease; stop using its machine if it does not answer. The agent ends when its lease does."""
        try:
            await asyncio.wait_for(member.actor.renew.remote(), self._patience.lease_s)
            member.heard = True
        except TimeoutError:
            if member.heard:
                self._leave(name, f"it has not answered for {self._patience.lease_s:g} s")
        except ray.exceptions.RayError as error:
            await self._lose(name, error)

    async def _lose(self, name: str, error: ray.exceptions.RayError) -> None:
        """Report that the agent is gone. If its machine is still there later, another is started on it."""
        with contextlib.suppress(TimeoutError):  # `_Bridge._watch` notices that the head does not answer
            alive = await asyncio.wait_for(asyncio.to_thread(machines), self._patience.head_s)
            if this_machine() not in alive:
                return  # Ray has died on this machine, so all agents are lost; `_Bridge._watch` handles that
        if name in self._roster.members:
            self._leave(name, in_a_line(error), may_return=False)
            if self._roster.has_failed(name):
                loop = asyncio.get_running_loop()
                loop.call_later(self._patience.back_s, self._roster.welcome, machine_of(name))

    def _leave(self, name: str, why: str, *, may_return: bool = True) -> None:
        """Use the machine no more for now, and say why."""
        member = self._end(name)
        if member is not None:
            if may_return:
                self._roster.expect_back(name)
            is_known = member.description is not None
            self._say(Message(left=Left(name, why)) if is_known else Message(unfit=Unfit(member.host, why)))

    def _end(self, name: str) -> Member | None:
        """End the agent, if it is one still, and return it."""
        member = self._roster.members.pop(name, None)
        if member is not None:
            self._spawn(_kill(member.actor))
        return member

    async def look_again(self) -> None:
        """Periodically ask the machines that are away, if they are free, whether they can be used again."""
        while True:
            await asyncio.sleep(self._patience.again_s)
            if self._roster.away:
                with contextlib.suppress(ray.exceptions.RayError):  # the watch over the cluster finds it too
                    alive, free = await asyncio.to_thread(lambda: (machines(), free_resources()))
                    self._roster.forget_others(alive)
                    are_free = [machine for machine in self._roster.away if self._is_free(alive[machine], free)]
                    await asyncio.gather(*map(self._return, are_free))

    def _is_free(self, machine: dict[str, Any], free: dict[str, dict[str, float]]) -> bool:
        left = free.get(machine["NodeID"], {}).get(self._resource)
        return bool(left == machine["Resources"].get(self._resource))

    async def _return(self, machine: str) -> None:
        """Let the machine join again if it answers and, if it was refused, has changed since."""
        with contextlib.suppress(TimeoutError, ray.exceptions.RayError, msgspec.DecodeError):  # asked again later
            line = await asyncio.wait_for(ask(machine, self._device), self._patience.ready_s)
            found = msgspec.json.decode(line, type=Description | None)
            if found is not None and self._roster.is_usable(machine, found):
                self._roster.welcome(machine)

    def end(self) -> None:
        """End all agents, which Ray does not do where it has no head."""
        for member in self._roster.members.values():
            member.actor.end.remote()


async def _kill(actor: Any) -> None:  # noqa: ANN401
    with contextlib.suppress(ray.exceptions.RayError):  # it is gone already
        await asyncio.to_thread(ray.kill, actor)  # which waits for the head


def _why_not_described(line: bytes) -> str:
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(line, type=_RawReply).error or "it does not describe itself"
    return "it does not describe itself"
