"""Which machines of a cluster a sweep uses, and why it leaves out the others."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from cs336_systems.config import Device
from cs336_systems.record import Identity
from cs336_systems.sweep.cluster.nodes import Look, Machine, Node


@dataclass(slots=True)
class Conditions:
    """What a sweep requires of its machines."""

    identity: Identity | None = None
    """Conditions in which all machines must be alike; None if not known before `choose`."""
    allow_mixed: bool = False
    require_device: str | None = None
    """Part of the name of the device that machines must have, without regard to case."""
    needs_nsys: bool = False
    """Whether a run is to be profiled by Nsight Systems."""

    def choose(self, nodes: Sequence[Node]) -> None:
        """If the conditions are not known yet, take those of the machines that have most slots among these."""
        slots: Counter[Identity] = Counter()
        for node in nodes:
            if self._why_unable(node) is None:
                slots[node.identity] += node.slots
        if slots and self.identity is None:
            self.identity = slots.most_common(1)[0][0]

    def why_refused(self, node: Node) -> str | None:
        """Why the sweep does not use the machine; None if it does. `choose` has been called with it."""
        why = self._why_unable(node)
        if why is not None or self.allow_mixed:
            return why
        assert self.identity is not None
        needed, found = asdict(self.identity), asdict(node.identity)
        different = [
            f"{name} is {found[name]}, needed {needed[name]}" for name in needed if found[name] != needed[name]
        ]
        return f"{'; '.join(different)}; --allow-mixed uses it too" if different else None

    def _why_unable(self, node: Node) -> str | None:
        """Why the machine could not measure what is wanted, whatever the others are like."""
        if (self.require_device or "").casefold() not in node.identity.device_name.casefold():
            return f"it has {node.identity.device_name}, needed {self.require_device}"
        if self.needs_nsys and not node.has_nsys:
            return "it has no nsys on the PATH, which --nsys needs"
        return None


def refusals(look: Look, conditions: Conditions) -> dict[str, str | None]:
    """By the name of each machine, why a sweep that begins now does not use it; None if it does."""
    conditions.choose([each.node for each in look.machines if each.node and each.count])
    return {each.name: _why_left_out(each, look.device, conditions) for each in look.machines}


def _why_left_out(machine: Machine, device: Device, conditions: Conditions) -> str | None:
    if machine.node is None:
        return machine.failure or "it does not describe itself"
    what, held = "GPUs" if device is Device.CUDA else "cores", machine.count - machine.free
    if not machine.count:
        return f"the cluster counts none of its {what}"
    is_held = f"other jobs hold {held:g} of its {machine.count:g} {what}" if held else None
    return conditions.why_refused(machine.node) or is_held
