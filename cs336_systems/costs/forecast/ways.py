"""Parameters, gradients and optimizer state that one rank keeps, for each way of sharing a step among ranks.

WAYS names one class for each way. NCCL's own buffers are not among PyTorch's allocations.
"""

from collections.abc import Mapping, Sequence

from cs336_systems.config import Parallel, Precision, RunConfig
from cs336_systems.costs.calls import BUCKET_BYTES, FIRST_BUCKET_BYTES, buckets_of
from cs336_systems.costs.forecast.parameters import parameter_shapes
from cs336_systems.costs.forecast.tape import Category, Tape
from cs336_systems.costs.shards import (
    FP32_BYTES,
    HALF_BYTES,
    HEAD,
    LOOKUP,
    REST,
    Unit,
    kept_elements,
    parameter_elements,
    units,
    updated_elements,
)

AHEAD = 2
"""Units that fsdp gathers ahead of the one that computes."""


class InPlace:
    """A step of one process, or one whose gradients are averaged in place; the base of all other ways."""

    steps = 2
    """Steps until the steady state: the optimizer makes its state in the first."""

    def __init__(self, config: RunConfig, tape: Tape) -> None:
        self.tape = tape
        self.elements = parameter_elements(config)
        shapes = parameter_shapes(config.model)
        self.updated = {
            name: shapes[name] if count == self.elements[name] else str(count)
            for name, count in updated_elements(config).items()
        }
        """Shapes of what this rank's optimizer updates; with a sharded optimizer, on the rank that has most."""
        self.low: frozenset[str] = frozenset()
        """Parameters that layers have in half precision, so that autocast makes no copy of them."""
        self.stream_bytes = FP32_BYTES
        """Bytes of an element of the residual stream."""
        self.gradients: dict[str, int] = {}
        """Gradients that exist now, by the parameter's name, in the order in which backward made them."""

    def set_up(self, parameters: Mapping[str, int]) -> None:
        """Called with the model's parameters before the first step."""

    def begin_step(self) -> None:
        """Called before forward."""

    def before_forward(self, unit: str) -> None:
        """Called before a block, the lookup of embeddings (LOOKUP) or the head; also before recomputation."""

    def after_forward(self, unit: str) -> None:
        """Called after the unit's forward or recomputation."""

    def end_forward(self) -> None:
        """Called after the loss."""

    def begin_backward(self) -> None:
        """Called before the gradient of the loss is used."""

    def before_backward(self, unit: str) -> None:
        """Called when the gradient of the unit's output is ready."""

    def after_backward(self, block: str) -> None:
        """Called when the gradient of a block's input is ready."""

    def graded(self, parameter: str, gradient: int) -> None:
        """Take the gradient of a parameter, which backward has just made."""
        self.gradients[parameter] = gradient

    def end_backward(self) -> None:
        """Called before backward returns."""

    def finish(self) -> None:
        """Called between backward and the optimizer."""

    def drop_gradients(self) -> None:
        """Set all gradients to None."""
        self.tape.drop(*self.gradients.values())
        self.gradients = {}

    def join(self, parameters: list[str]) -> int:
        """One tensor with room for the gradients of all these parameters."""
        size = str(sum(self.elements[name] for name in parameters))
        return self.tape.new(Category.GRADIENTS, "gradients joined for an all-reduce", size, FP32_BYTES)

    def replace(self, parameters: list[str], joined: int) -> None:
        """Replace the gradients of these parameters by views of the joined tensor, whose reference this takes over."""
        for name in parameters:
            self.tape.drop(self.gradients[name])
            self.gradients[name] = self.tape.keep(joined)
        self.tape.drop(joined)


class Flat(InPlace):
    """All gradients are joined after backward."""

    def finish(self) -> None:
        every = list(self.gradients)
        self.replace(every, self.join(every))


class Received(InPlace):
    """Each rank keeps buffers for the gradients of every other rank."""

    def __init__(self, config: RunConfig, tape: Tape) -> None:
        super().__init__(config, tape)
        self._others = config.ranks - 1

    def set_up(self, parameters: Mapping[str, int]) -> None:
        for name in parameters:
            size = str(self._others * self.elements[name])
            self.tape.new(Category.GRADIENTS, "gradients received from other ranks", size, FP32_BYTES)


class Buckets(InPlace):
    """PyTorch's DistributedDataParallel: permanent buckets, of which the gradients become views.

    With a static graph one bucket takes all gradients, at the end of the first backward, and one by one in the second.
    In the third step the order of the gradients is known, and buckets of BUCKET_BYTES replace the first bucket.
    """

    steps = 4

    def __init__(self, config: RunConfig, tape: Tape) -> None:
        super().__init__(config, tape)
        self._bucket_of: dict[str, int] = {}
        self._step = 0
        self._order: list[str] = []

    def set_up(self, parameters: Mapping[str, int]) -> None:
        self._make([list(parameters)])

    def begin_step(self) -> None:
        self._step += 1
        if self._step == 3:
            old = [*self._bucket_of.values()]
            sizes = {name: FP32_BYTES * self.elements[name] for name in self._order}
            self._make(buckets_of(sizes, BUCKET_BYTES, FIRST_BUCKET_BYTES))
            self.tape.drop(*old)  # only now: reserved memory on H200s shows that the old bucket exists until here

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


class FullySharded(InPlace):
    """Parts of matrices, which are gathered by unit AHEAD of their use, into memory that is freed after use.

    The whole gradients of a unit stay until those of the next unit are ready. Vectors are averaged in place.
    """

    keeps_what_is_sent = False

    def __init__(self, config: RunConfig, tape: Tape) -> None:
        super().__init__(config, tape)
        self._units = {unit.name: unit for unit in units(config)}
        self._unit_of = {name: unit for unit in self._units.values() for name in unit.counts}
        self.low = frozenset(name for name, unit in self._unit_of.items() if unit.element_bytes < FP32_BYTES)
        self._order: list[str] = []
        """Units in the order of the last forward."""
        self._seen: list[str] = []
        self._in_backward = False
        self._gathered: dict[str, int] = {}
        self._sent: dict[str, int] = {}
        """Parts that are being sent to other ranks in another type than they are kept in, by unit."""
        self._whole: dict[str, dict[str, int]] = {name: {} for name in self._units}
        """Gradients of whole parameters, by unit."""
        self._reducing: Unit | None = None
        self._means: dict[str, int] = {}
        """This rank's parts of averages in the type in which they are scattered, by unit."""

    def set_up(self, parameters: Mapping[str, int]) -> None:
        for unit in self._units.values():
            if unit.counts:
                self._parts(unit, FP32_BYTES, Category.PARAMETERS, "parts of parameters")
                self.tape.drop(self._room(unit))
        self.tape.drop(*(parameters[name] for name in self._unit_of))

    def _parts(self, unit: Unit, element_bytes: int, category: Category, label: str) -> int:
        return self.tape.new(category, label, str(unit.part_elements), element_bytes)

    def _room(self, unit: Unit) -> int:
        size = str(unit.gathered_elements)
        return self.tape.new(Category.GATHERED, "gathered parameters of a unit", size, unit.element_bytes)

    def begin_step(self) -> None:
        self._order, self._seen, self._in_backward = self._seen or self._order, [], False
        self._gather(REST)
        self._gather_ahead(self._order[:AHEAD])

    def before_forward(self, unit: str) -> None:
        if unit not in self._units:
            return
        self._gather(unit)
        if not self._in_backward:
            place = len(self._seen)
            self._seen.append(unit)
            if self._order:
                self._gather_ahead(self._order[place + 1 : place + 1 + AHEAD])

    def after_forward(self, unit: str) -> None:
        if unit in self._units and not self._in_backward and unit not in self._order[-1:]:
            self._free(unit)

    def before_backward(self, unit: str) -> None:
        self._in_backward = True
        if unit in self._units:
            self._gather(unit)
            place = self._seen.index(unit)
            self._gather_ahead([each for each in self._seen[max(0, place - AHEAD) : place][::-1] if each != LOOKUP])

    def _gather_ahead(self, names: Sequence[str]) -> None:
        for name in names:
            unit = self._units[name]
            if name not in self._gathered and unit.counts:
                self._gathered[name] = self._room(unit)
                if unit.element_bytes < FP32_BYTES and not self.keeps_what_is_sent:
                    self._sent[name] = self._parts(unit, unit.element_bytes, Category.GATHERED, "parts, cast")

    def _gather(self, name: str) -> None:
        self._gather_ahead([name])
        if name in self._sent:
            self.tape.drop(self._sent.pop(name))

    def _free(self, name: str) -> None:
        if name in self._gathered:
            self._gather(name)
            self.tape.drop(self._gathered.pop(name))

    def graded(self, parameter: str, gradient: int) -> None:
        unit = self._unit_of.get(parameter)
        if unit is None:
            super().graded(parameter, gradient)
            return
        whole = self._whole[unit.name]
        whole[parameter] = gradient
        if len(whole) == len(unit.counts):
            self._take_gradients()
            self._reduce(unit)
            if unit.name != REST:
                self._free(unit.name)

    def _reduce(self, unit: Unit) -> None:
        averaged = self._parts(unit, unit.element_bytes, Category.GRADIENTS, "parts of gradients, averaged")
        self._means[unit.name] = averaged
        whole = self._whole[unit.name]
        for (name, count), length in zip(unit.counts.items(), unit.lengths, strict=True):
            if count % unit.ranks:
                size = str(unit.ranks * length)
                padded = self.tape.new(Category.GRADIENTS, "gradients, padded", size, unit.element_bytes)
                self.tape.drop(whole[name])
                whole[name] = padded
        self._reducing = unit

    def _take_gradients(self) -> None:
        """Free the whole gradients that have been scattered; give the parts theirs in fp32."""
        unit, self._reducing = self._reducing, None
        if unit is not None:
            self.tape.drop(*self._whole[unit.name].values())
            self._whole[unit.name] = {}
            self._give(unit)

    def _give(self, unit: Unit) -> None:
        mean = self._means.pop(unit.name)
        if unit.element_bytes < FP32_BYTES:
            narrow, mean = mean, self._parts(unit, FP32_BYTES, Category.GRADIENTS, "parts of gradients")
            self.tape.drop(narrow)
        for name in unit.counts:
            self.gradients[name] = self.tape.keep(mean)
        self.tape.drop(mean)

    def finish(self) -> None:
        self._take_gradients()
        for name in self._units:
            self._free(name)
        self._in_backward = False


class FullyPushed(FullySharded):
    """FullySharded by copies; casts of a rank's parts and buffers for the other ranks' gradients are permanent.

    Shards get their gradients after backward, when those of all ranks have arrived.
    """

    keeps_what_is_sent = True

    def set_up(self, parameters: Mapping[str, int]) -> None:
        super().set_up(parameters)
        found = [unit for unit in self._units.values() if unit.counts]
        for unit in found:
            if unit.element_bytes < FP32_BYTES:
                self._parts(unit, unit.element_bytes, Category.GATHERED, "parts, cast")
        for unit in found:
            rows = str((unit.ranks - 1) * unit.part_elements)
            self.tape.new(Category.GRADIENTS, "parts of other ranks' gradients", rows, unit.element_bytes)

    def _give(self, unit: Unit) -> None:
        pass

    def finish(self) -> None:
        super().finish()
        for unit in self._units.values():
            if unit.counts:
                super()._give(unit)


class FullyShard(InPlace):
    """PyTorch's fully_shard of each block and of the rest; the rest's parameters stay gathered from forward on.

    Every parameter is gathered in half precision under autocast, that of the embedding too, so the residual stream is
    in half precision. A unit is gathered into one tensor and copied from it, and gradients are copied to be averaged,
    on streams of their own.
    """

    def __init__(self, config: RunConfig, tape: Tape) -> None:
        super().__init__(config, tape)
        self._bytes = HALF_BYTES if config.precision is Precision.BF16 else FP32_BYTES
        self.stream_bytes = self._bytes
        self._lengths: dict[str, dict[str, int]] = {}
        """Elements of a rank's part of each parameter, cut along its first axis, by unit."""
        for name, count in kept_elements(config).items():
            unit = name.partition(".")[0] if name[0].isdigit() else REST
            self._lengths.setdefault(unit, {})[name] = count
        self._ranks = config.ranks
        if self._bytes < FP32_BYTES:
            self.low = frozenset(self.elements) | {HEAD}
        self._order: list[str] = []
        """Units in the order in which forward ended them."""
        self._arriving: dict[str, int] = {}
        self._arrived: int | None = None
        """Tensor into which the last unit of forward was gathered."""
        self._there: dict[str, list[int]] = {}
        self._graded: dict[str, dict[str, int]] = {unit: {} for unit in self._lengths}
        self._sent: int | None = None
        """Copies of gradients that are being reduced."""
        self._is_again = False

    def set_up(self, parameters: Mapping[str, int]) -> None:
        *blocks, rest = sorted(self._lengths, key=lambda unit: (unit == REST, int(unit) if unit != REST else 0))
        for unit in (*blocks, rest):
            for name, length in self._lengths[unit].items():
                self.tape.new(Category.PARAMETERS, "parts of parameters", str(length), FP32_BYTES)
                self.tape.drop(parameters[name])

    def _whole(self, unit: str, category: Category, label: str, stream: str = "") -> int:
        """One tensor with room for the parameters of a unit."""
        size = self._ranks * sum(self._lengths[unit].values())
        return self.tape.new(category, label, str(size), self._bytes, stream)

    def _start(self, unit: str) -> None:
        if unit in self._there or unit in self._arriving:
            return
        is_cast = self._bytes < FP32_BYTES
        cast = [self._part(unit, self._bytes, Category.GATHERED, "parts, cast", "gather")] if is_cast else []
        self._arriving[unit] = self._whole(unit, Category.GATHERED, "all parts of a unit", "gather")
        self.tape.drop(*cast)

    def _part(self, unit: str, element_bytes: int, category: Category, label: str, stream: str) -> int:
        return self.tape.new(category, label, str(sum(self._lengths[unit].values())), element_bytes, stream)

    def _gather(self, unit: str, *, in_forward: bool) -> None:
        self._start(unit)
        if unit in self._there:
            return
        if in_forward:
            self._flush()
        self._there[unit] = [
            self.tape.new(Category.GATHERED, "gathered parameters", str(self._ranks * length), self._bytes)
            for length in self._lengths[unit].values()
        ]
        arrived = self._arriving.pop(unit)
        if in_forward:
            self._arrived = arrived
        else:
            self.tape.drop(arrived)

    def _flush(self) -> None:
        if self._arrived is not None:
            self.tape.drop(self._arrived)
            self._arrived = None

    def _free(self, unit: str) -> None:
        self.tape.drop(*self._there.pop(unit))

    def begin_step(self) -> None:
        self._is_again = False
        self._gather(REST, in_forward=True)

    def before_forward(self, unit: str) -> None:
        if unit in self._lengths:
            self._gather(unit, in_forward=not self._is_again)

    def after_forward(self, unit: str) -> None:
        if unit in self._lengths and not self._is_again:
            self._order.append(unit)
            self._free(unit)

    def end_forward(self) -> None:
        self._flush()

    def begin_backward(self) -> None:
        self._is_again = True
        self._start(self._order.pop())

    def before_backward(self, unit: str) -> None:
        if unit in self._lengths:
            self._gather(unit, in_forward=False)
            if self._order:
                self._start(self._order.pop())

    def graded(self, parameter: str, gradient: int) -> None:
        unit = parameter.partition(".")[0]
        self._graded[unit if unit in self._lengths else REST][parameter] = gradient

    def after_backward(self, block: str) -> None:
        self._reduce(block)

    def _reduce(self, unit: str) -> None:
        self._free(unit)
        self._end_reduce()
        self._sent = self._whole(unit, Category.GRADIENTS, "copies of gradients")
        self.tape.drop(*self._graded[unit].values())
        self._graded[unit] = {}
        mean = self._part(unit, self._bytes, Category.GRADIENTS, "parts of gradients, averaged", "reduce")
        if self._bytes < FP32_BYTES:
            narrow, mean = mean, self._part(unit, FP32_BYTES, Category.GRADIENTS, "parts of gradients", "reduce")
            self.tape.drop(narrow)
        for name in self._lengths[unit]:
            self.gradients[name] = self.tape.keep(mean)
        self.tape.drop(mean)

    def _end_reduce(self) -> None:
        if self._sent is not None:
            self.tape.drop(self._sent)
            self._sent = None

    def end_backward(self) -> None:
        self._reduce(REST)
        self._end_reduce()


WAYS: dict[Parallel, type[InPlace]] = {
    Parallel.NONE: InPlace,
    Parallel.DDP_NAIVE: InPlace,
    Parallel.DDP_FLAT: Flat,
    Parallel.DDP_OVERLAP: InPlace,
    Parallel.DDP_PUSH: Received,
    Parallel.DDP: Buckets,
    Parallel.FSDP: FullySharded,
    Parallel.FSDP_PUSH: FullyPushed,
    Parallel.FSDP2: FullyShard,
}
"""The ways whose memory is predicted."""
