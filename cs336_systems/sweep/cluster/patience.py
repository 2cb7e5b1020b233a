"""How long a sweep on a Ray cluster waits for its machines, and how often it looks at them."""

import msgspec


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds. Tests of faults shorten them; a user has no need to."""

    look_s: float = 3.0
    """How often the cluster is asked for its machines, and their agents are told that the sweep goes on."""
    head_s: float = 10.0
    """How long the head of the cluster may take to answer."""
    lease_s: float = 12.0
    """How long an agent may take to answer its sweep, and how long it goes on without a message from the sweep."""
    ready_s: float = 120.0
    """How long a machine may take until it is ready to measure."""
    back_s: float = 6.0
    """How long after the death of an agent another is started on its machine, if that has not died too."""
    again_s: float = 20.0
    """How often machines that were left alone are asked whether they can be used again."""


PATIENCE = Patience()
