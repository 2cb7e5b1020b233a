"""Messages between the driver of a sweep and the process that is connected to Ray: each is a line of JSON."""

import msgspec

from cs336_systems.files import MAX_BYTES
from cs336_systems.sweep.cluster.measurer import Request
from cs336_systems.sweep.cluster.nodes import Answer, Chunk, Connected, Joined, Left, Pending, Unfit

MAX_LINE_BYTES = 2 * MAX_BYTES
"""Longest line; it must hold a record, which base64 makes 4/3 as long."""


class Part(msgspec.Struct):
    """The next part of a file that a run has left, or without a file the end of all files of that run."""

    key: str
    file: str | None = None
    offset: int = 0


class Command(msgspec.Struct, omit_defaults=True):
    """Order to measure a run on a machine, to send or remove a run's files, or otherwise to stop using the machine."""

    name: str
    run: Request | None = None
    part: Part | None = None
    refused: bool = False
    """In an order to stop using the machine: whether it did not meet the conditions."""


class Message(msgspec.Struct, omit_defaults=True):
    """One event; without any, it means that the machines that were there at the start have joined."""

    connected: Connected | None = None
    failed: str | None = None
    """Why the connection is lost or could not be made."""
    joined: Joined | None = None
    left: Left | None = None
    answer: Answer | None = None
    chunk: Chunk | None = None
    unfit: Unfit | None = None
    pending: Pending | None = None
