"""The runs of a sweep that wait for a machine, and which of them a machine starts next."""

import heapq
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

from cs336_systems.record import Identity
from cs336_systems.sweep.cluster.nodes import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """On which machines runs may be measured; not a setting of the runs."""

    same_node: bool = False
    """Repeats of a configuration stay on one machine; otherwise on one kind of machine."""
    share_nodes: bool = False
    """Whether a run that the CPU limits shares its machine with others, as any run does, or has it to itself."""


ANYWHERE = Placement()


class Waits(Protocol):
    """The properties of a run that decide where it is measured."""

    order: int
    family: str
    width: int


Home: TypeAlias = Identity | tuple[Identity, str] | None
"""Where the runs of a family belong: a kind of machine, the machine of this kind on this host, or anywhere yet."""
_Size: TypeAlias = tuple[bool, int]
"""Whether a run may share its machine, and its width; the highest starts first."""
T = TypeVar("T", bound=Waits)


class Waiting(Generic[T]):
    """Runs that wait for a machine: widest first, then in the order of the sweep.

    While a wide run waits, no narrower one starts on a machine on which the wide one could run; otherwise the slots
    that it needs would never be free at the same time. Runs that need a machine to themselves come last, so that
    machines are emptied for them once only.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._heaps: defaultdict[tuple[Home, _Size], list[tuple[int, T]]] = defaultdict(list)
        """A run is in the heap of its family's home, or in that of an earlier home until it comes first there."""
        self._sizes: set[_Size] = set()
        self._homes: dict[str, Home] = {}
        self._apart: set[str] = set()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        return (run for heap in self._heaps.values() for _, run in heap)

    def push(self, run: T) -> None:
        """Add a run to those that wait."""
        self._count += 1
        self._put(run)

    def pop(self, node: Node, free: int) -> T | None:
        """The run that the machine starts next; None if there is none, or too few of its slots are free."""
        sizes = sorted((size for size in self._sizes if size[1] <= node.slots), reverse=True)
        heaps = {size: found for size in sizes if (found := self._for(node, size))}
        if not heaps:
            return None
        may_share, width = next(iter(heaps))
        if (width if may_share else node.slots) > free:
            return None
        run = heapq.heappop(min(heaps[may_share, width], key=lambda heap: heap[0][0]))[1]
        self._count -= 1
        self.settle(run.family, node)
        return run

    def settle(self, family: str, node: Node) -> None:
        """Bind the family to this machine or its kind, unless it has a home already."""
        home = self._homes.get(family)
        if self._placement.same_node and not isinstance(home, tuple):
            self._homes[family] = node.identity, node.host
        elif home is None:
            self._homes[family] = node.identity

    def leave(self, node: Node) -> None:
        """Bind the families of a machine that is gone to its kind, until one of their runs starts."""
        home = (node.identity, node.host)
        for family in [family for family, found in self._homes.items() if found == home]:
            self._homes[family] = node.identity
        for key in [key for key in self._heaps if key[0] == home]:
            for _, run in self._heaps.pop(key):
                self._put(run)

    def set_apart(self, family: str) -> None:
        """Runs of the family have a machine to themselves from now on, unless they may share it."""
        if not self._placement.share_nodes:
            self._apart.add(family)
            self._sizes |= {(False, width) for _, width in self._sizes}

    def is_apart(self, family: str) -> bool:
        """Whether runs of the family have a machine to themselves."""
        return family in self._apart

    def _put(self, run: T) -> None:
        key = self._key(run)
        self._sizes.add(key[1])
        heapq.heappush(self._heaps[key], (run.order, run))

    def _key(self, run: T) -> tuple[Home, _Size]:
        return self._homes.get(run.family), (run.family not in self._apart, run.width)

    def _for(self, node: Node, size: _Size) -> list[list[tuple[int, T]]]:
        """The heaps that have runs of this size for the machine."""
        heaps = []
        for home in (None, node.identity, (node.identity, node.host)):
            heap = self._heaps[home, size]
            while heap and self._key(heap[0][1]) != (home, size):
                self._put(heapq.heappop(heap)[1])
            heaps.append(heap)
        return [heap for heap in heaps if heap]
