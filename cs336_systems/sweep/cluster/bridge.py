"""The process between the driver of a sweep and Ray: the driver does not import ray, and does not die with it.

The process reads `Command`s from standard input and writes `Message`s to standard output, each a line of JSON. Standard
error is for Ray and for one line that says why the process ends. Records pass through as undecoded bytes.
"""

import asyncio
import os
import queue
import sys
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, BinaryIO

import msgspec
import ray

from cs336_systems.config import Device
from cs336_systems.sweep.cluster.agents import Agents
from cs336_systems.sweep.cluster.connection import begin, connect, in_a_line, machines, num_pending, this_machine
from cs336_systems.sweep.cluster.messages import MAX_LINE_BYTES, Command, Message
from cs336_systems.sweep.cluster.nodes import Connected, Pending
from cs336_systems.sweep.cluster.patience import Patience

_PARTING_S = 0.5
"""How long the last calls to the agents may take."""


class _Speaker:
    """Writes messages in a thread: the driver may be writing to a slow disk, and agents do not wait for that."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._speak, daemon=True)
        self._thread.start()

    def say(self, message: Message) -> None:
        """Send the message as soon as the driver reads."""
        self._messages.put(message)

    def _speak(self) -> None:
        while (message := self._messages.get()) is not None:
            self._out.write(msgspec.json.encode(message) + b"\n")
            self._out.flush()

    def end(self) -> None:
        """End this process once everything has been said, if the driver listens."""
        self._messages.put(None)
        self._thread.join(_PARTING_S)
        os._exit(0)  # a normal exit of Python could wait for a head that is gone


class _Bridge:
    """The concurrent tasks of the process; it ends if any of them fails."""

    def __init__(self, device: Device, modules: Sequence[str], patience: Patience, speaker: _Speaker) -> None:
        self._patience, self._speaker = patience, speaker
        self._agents = Agents(device, modules, patience, speaker.say, self._spawn)
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def serve(self) -> None:
        """Watch the cluster and obey the driver until either is gone."""
        lines = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        reading = lambda: asyncio.StreamReaderProtocol(lines)  # noqa: E731
        await asyncio.get_running_loop().connect_read_pipe(reading, sys.stdin)
        for work in (self._watch(), self._agents.renew(), self._agents.look_again(), self._count_pending()):
            self._spawn(work)
        obeying = asyncio.create_task(self._obey(lines))
        await asyncio.wait({obeying, self._failure}, return_when=asyncio.FIRST_COMPLETED)
        ended = self._failure if self._failure.done() else obeying
        if (error := ended.exception()) is not None:
            self._speaker.say(Message(failed=in_a_line(error)))
        self._failure.cancel()  # what fails from here on is of no interest
        self._agents.end()
        await asyncio.sleep(_PARTING_S)
        self._speaker.end()

    async def _obey(self, lines: asyncio.StreamReader) -> None:
        while line := await lines.readline():
            self._agents.obey(msgspec.json.decode(line, type=Command))

    async def _watch(self) -> None:
        """Keep the agents in step with the machines of the cluster; raise OSError if this one or the head is gone."""
        this = this_machine()
        while True:
            try:
                alive = await asyncio.wait_for(asyncio.to_thread(machines), self._patience.head_s)
            except TimeoutError:
                raise OSError(f"its head did not answer within {self._patience.head_s:g} s") from None
            if this not in alive:
                raise OSError("Ray has died on this machine, and takes along what was started from here")
            self._agents.update(alive)
            await asyncio.sleep(self._patience.look_s)

    async def _count_pending(self) -> None:
        """Say how many machines the autoscaler has ordered, whenever that changes."""
        told = 0
        while True:
            count = await asyncio.to_thread(num_pending)
            if count is not None and count != told:
                told = count
                self._speaker.say(Message(pending=Pending(count)))
            await asyncio.sleep(self._patience.look_s)


async def _serve(device: Device, modules: Sequence[str], patience: Patience, speaker: _Speaker) -> None:
    await _Bridge(device, modules, patience, speaker).serve()


def main(words: Sequence[str]) -> None:
    """Serve the driver `words[0]` with the cluster at `words[1]`.

    The device is `words[2]`, the `Patience` in JSON `words[3]`; the modules `words[4:]` are preloaded on each machine.
    """
    speaker = _Speaker(begin(words[0]))
    patience = msgspec.json.decode(words[3], type=Patience)
    try:
        speaker.say(Message(connected=Connected(connect(words[1], patience.head_s))))
        asyncio.run(_serve(Device(words[2]), words[4:], patience, speaker))
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        speaker.say(Message(failed=in_a_line(error)))
    speaker.end()


if __name__ == "__main__":
    main(sys.argv[1:])
