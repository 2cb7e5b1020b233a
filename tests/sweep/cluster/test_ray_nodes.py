"""The connection to Ray as the driver sees it, where a script writes what Ray's side would."""

import subprocess
import sys
import tempfile

import msgspec

from cs336_systems.record import Identity
from cs336_systems.sweep.cluster.messages import Message
from cs336_systems.sweep.cluster.nodes import Joined, Left, Node
from cs336_systems.sweep.cluster.ray_nodes import RayNodes

IDENTITY = Identity(device_name="H200", driver="1", torch="2", code="0")


def test_a_machine_that_dies_while_others_join_is_not_used():
    joined = [Joined(Node(name=name, host=name, identity=IDENTITY, slots=1, has_nsys=True)) for name in "abc"]
    said = [Message(joined=joined[0]), Message(joined=joined[1]), Message(left=Left("a", "dead")),
            Message(), Message(joined=joined[2]), Message(left=Left("b", "dead"))]  # fmt: skip
    lines = "\n".join(msgspec.json.encode(message).decode() for message in said)
    script = f"print({lines!r}, flush=True); input()"
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        nodes, events = RayNodes(process, errors, "cluster", 60.0), []
        while len(events) < 3:
            events += nodes.events(60.0)
        process.communicate()
    assert events == [joined[1], joined[2], Left("b", "dead")]
