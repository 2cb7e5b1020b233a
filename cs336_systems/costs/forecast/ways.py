"""What each way of sharing a step among ranks keeps of parameters, gradients and the optimizer's state on one rank.

One class for each way, named in WAYS. NCCL's own buffers are not among PyTorch's allocations.
"""

from cs336_systems.config import Parallel, RunConfig
from cs336_systems.costs.communication import BUCKET_BYTES, buckets_of
from cs336_systems.costs.forecast.parameters import axes, elements, parameter_shapes
from cs336_systems.costs.forecast.tape import Category, Tape

FP32_BYTES = 4
FIRST_BUCKET_BYTES = 2**20
"""The first bucket of PyTorch's DistributedDataParallel, which is smaller so that its all-reduce starts early."""


class InPlace:
    """A step of one process, or one whose gradients are averaged where they are."""

    steps = 3
    """Steps after which nothing changes: the optimizer makes its state in the first, blocks settle in the second."""

    def __init__(self, config: RunConfig, tape: Tape) -> None:
        self.tape = tape
        self.shapes = parameter_shapes(config.model)
        sizes = axes(config)
        self.elements = {name: elements(shape, sizes) for name, shape in self.shapes.items()}
        self.updated = _largest_share(self.elements, config.ranks) if config.shard_optimizer else tuple(self.shapes)
        """Parameters that this rank's optimizer updates; with a shared optimizer, those of the rank that has most."""
        self.gradients: dict[str, int] = {}
        """Gradients that are there, by the parameter's name, in the order in which backward made them."""

    def set_up(self) -> None:
        """What the way makes before the first step."""

    def begin_step(self) -> None:
        """What it makes before forward."""

    def graded(self, parameter: str, gradient: int) -> None:
        """Take the gradient of a parameter, which backward has just made."""
        self.gradients[parameter] = gradient

    def end_backward(self) -> None:
        """What it does before backward returns."""

    def finish(self) -> None:
        """What it does between backward and the optimizer."""

    def drop_gradients(self) -> None:
        """Set all gradients to None."""
        self.tape.drop(*self.gradients.values())
        self.gradients = {}

    def join(self, parameters: list[str]) -> int:
        """One tensor with room for the gradients of all these parameters."""
        size = str(sum(self.elements[name] for name in parameters))
        return self.tape.new(Category.GRADIENTS, "gradients joined for an all-reduce", size, FP32_BYTES)

    def replace(self, parameters: list[str], joined: int) -> None:
        """Let views of the joined tensor, whose reference this takes, be the gradients of these parameters."""
        for name in parameters:
            self.tape.drop(self.gradients[name])
            self.gradients[name] = self.tape.keep(joined)
        self.tape.drop(joined)


class Flat(InPlace):
    """All gradients are joined after backward."""

    def finish(self) -> None:
        every = list(self.gradients)
        self.replace(every, self.join(every))


class Buckets(InPlace):
    """PyTorch's DistributedDataParallel: buckets that are always there, of which the gradients become views.

    With a static graph one bucket takes all gradients at the end of the first backward, and one by one in the second.
    Then the order in which they are made is known, and buckets of BUCKET_BYTES replace it.
    """

    steps = 4

    def __init__(self, config: RunConfig, tape: Tape) -> None:
        super().__init__(config, tape)
        self._bucket_of: dict[str, int] = {}
        self._step = 0
        self._order: list[str] = []

    def set_up(self) -> None:
        self._make([list(self.shapes)])

    def begin_step(self) -> None:
        self._step += 1
        if self._step == 3:
            old = [*self._bucket_of.values()]
            sizes = {name: FP32_BYTES * self.elements[name] for name in self._order}
            self._make(buckets_of(sizes, BUCKET_BYTES, FIRST_BUCKET_BYTES))
            self.tape.drop(*old)  # only now: memory that was reserved on H200s shows that it is still held

    def _make(self, buckets: list[list[str]]) -> None:
        for bucket in buckets:
            made = self.join(bucket)
            self._bucket_of |= {name: self.tape.keep(made) for name in bucket}
            self.tape.drop(made)

    def graded(self, parameter: str, gradient: int) -> None:
        super().graded(parameter, gradient)
        if self._step > 1:
            self._copy(parameter)

    def _copy(self, parameter: str) -> None:
        self.tape.drop(self.gradients[parameter])
        self.gradients[parameter] = self.tape.keep(self._bucket_of[parameter])

    def end_backward(self) -> None:
        if self._step == 1:
            for parameter in self.gradients:
                self._copy(parameter)
        self._order = list(self.gradients)


WAYS: dict[Parallel, type[InPlace]] = {
    Parallel.NONE: InPlace,
    Parallel.DDP_NAIVE: InPlace,
    Parallel.DDP_FLAT: Flat,
    Parallel.DDP_OVERLAP: InPlace,
    Parallel.DDP: Buckets,
}
"""The ways whose memory is predicted."""


def _largest_share(elements: dict[str, int], ranks: int) -> tuple[str, ...]:
    """The parameters of the rank that owns most: each goes to the rank that has the fewest elements so far."""
    owned: list[list[str]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for name, count in elements.items():
        owner = totals.index(min(totals))
        owned[owner].append(name)
        totals[owner] += count
    return tuple(owned[totals.index(max(totals))])
