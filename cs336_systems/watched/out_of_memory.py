"""Why memory did not suffice for a step of a watched loop: what held it, where the step was, and
which batch would fit.

The exception goes on as it is. Nothing is allocated on the device, and nothing of the step is kept.
"""

import dis
import gc
import inspect
import linecache
import re
import sys
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import CellType, CodeType, FrameType, TracebackType

import torch
from torch import nn

from ..config import Device, Phase
from ..costs.fit import CUDA_CONTEXT_BYTES
from ..costs.graphs import all_tensors
from ..costs.tape import Category
from ..loop_record import CACHED, Holder, OutOfMemory
from ..measure.failure import describe, requested_bytes
from ..record import Failure, Status
from .fitting import LOSSES, Fitting, Kept, Loop, beside_call, fitting
from .holders import Graph, Ledger, Modules, held_by
from .observer import Observer
from .tokens import PassReader

NOT_REACHED = "not reached (buffers within operators, workspaces of libraries)"
POOLS = "private pools, not reached"
PACKAGE = Path(__file__).parents[1]
TORCH = Path(torch.__file__).parent
MAX_LINE = 100
"""Longest text of a line of code that is kept."""
BACKWARD = "_engine_run_backward"
"""PyTorch's function that runs backward."""
ALLOWED = re.compile(r"([\d.]+ [KMG]iB) allowed")
"""What PyTorch says where a fraction of the memory was set."""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """The memory of a GPU, in bytes."""

    total: int
    free: int
    """What the driver has left."""
    reserved: int
    allocated: int
    allowed: int
    """The most that PyTorch's allocator may take."""
    block_bytes: dict[int, int]
    """The allocator's blocks that hold tensors, by address."""
    is_expandable: bool
    """Whether any of its segments grows."""
    pool_bytes: int
    """What private pools, as of CUDA graphs, have given out."""

    @property
    def others(self) -> int:
        """What other programs and the CUDA context hold."""
        return max(0, self.total - self.free - self.reserved)

    @property
    def room(self) -> int:
        """What the allocator can have: a context grows with the kernels that are loaded."""
        return min(self.allowed, self.total - max(self.others, CUDA_CONTEXT_BYTES))


def device_memory(device: torch.device, message: str) -> DeviceMemory | None:
    """The memory of the device; None on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    blocks: dict[int, int] = {}
    pool_bytes, is_expandable = 0, False
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] != device.index:
            continue
        address = segment["address"]
        is_expandable |= bool(segment.get("is_expandable"))
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                blocks[address] = block["size"]
                if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
                    pool_bytes += block["size"]
            address += block["size"]
    allowed = ALLOWED.search(message)
    told = requested_bytes(f"tried to allocate {allowed[1]}") if allowed else None
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    return DeviceMemory(
        total=total,
        free=free,
        reserved=torch.cuda.memory_reserved(device),
        allocated=torch.cuda.memory_allocated(device),
        allowed=told if told and fraction == 1 else int(fraction * total),
        block_bytes=blocks,
        is_expandable=is_expandable,
        pool_bytes=pool_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a step failed."""

    doing: str
    line: str
    called_at: str
    module: str
    loss: str | None
    """The function of the loss that the loop's code names, or that a module computes."""
    is_named: bool
    """Whether the code gives a name to what the model returns; False if it failed elsewhere."""
    kept: Kept
    """How long a name lasts in the function that calls the model, or fails."""


class OutOfMemoryExplainer(Observer):
    """Explains the last step for which memory did not suffice."""

    def __init__(
        self,
        models: Iterable[nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        reader: PassReader,
        device: torch.device,
    ) -> None:
        self._models = [weakref.ref(model) for model in models]
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._reader, self._device = reader, device
        self._others: list[tuple[Hashable, int]] = []
        """What describes the tensors that belong to nothing of the model, and their bytes."""
        self._has_result = False
        """Whether the loop had what the model returned, when it had returned."""
        self._fittings: dict[tuple[Loop, int], Fitting] = {}
        """What was traced, by the loop and the room in MiB."""
        self.last: OutOfMemory | None = None
        """What was found of the last such step."""
        self.failure: Failure | None = None
        """The error of that step."""

    def step_failed(self, number: int, error: BaseException) -> None:
        """Explain the step if memory did not suffice for it."""
        if not isinstance(error, torch.OutOfMemoryError):
            return
        told = OutOfMemory(step=number, doing="", requested_bytes=requested_bytes(str(error)))
        self.last = told
        device = Device.CUDA if self._device.type == "cuda" else Device.CPU
        where = f"step {number}" if number >= 0 else "the warm-up"
        self.failure = describe(error, Status.OOM, where, device)
        models = [model for reference in self._models if (model := reference()) is not None]
        modules = Modules(models)
        place = place_of(error, modules)
        told = self.last = replace(
            told, doing=place.doing, line=place.line, called_at=place.called_at, module=place.module
        )
        memory = device_memory(self._device, str(error))
        told = self.last = self._with_holders(told, modules, memory)
        if memory is not None:
            self.last = self._with_fits(told, place, memory)

    def _with_holders(
        self, told: OutOfMemory, modules: Modules, memory: DeviceMemory | None
    ) -> OutOfMemory:
        """Add what holds the memory."""
        ledger = Ledger(self._device, memory.block_bytes if memory is not None else {})
        tensors = all_tensors()
        running = told.module if told.doing == Phase.FORWARD else ""
        graph = Graph(tensors, modules, running)
        if told.doing == Phase.BACKWARD and not told.module:
            told = replace(told, module=graph.next_backward())
        self._has_result = told.doing != Phase.FORWARD and graph.has_result(tensors)
        self._others = held_by(ledger, modules, self._living_optimizers(), tensors, graph)
        holders = ledger.holders()
        if memory is None:
            return replace(told, holders=tuple(holders))
        return replace(
            told,
            holders=tuple(_with_rest(holders, memory)),
            allocated_bytes=memory.allocated,
            reserved_bytes=memory.reserved,
            total_bytes=memory.total,
            room_bytes=memory.room,
            others_bytes=memory.others,
        )

    def _kept(self, place: Place) -> Kept:
        """How long the loop has what the model returned: by its code, and by what was alive."""
        if not (place.is_named or self._has_result):
            return Kept.LOSS
        return Kept.STEP if place.doing == Phase.OPTIMIZER else place.kept

    def _living_optimizers(self) -> list[torch.optim.Optimizer]:
        return [one for reference in self._optimizers if (one := reference()) is not None]

    def _with_fits(self, told: OutOfMemory, place: Place, memory: DeviceMemory) -> OutOfMemory:
        """Add which batches would fit, or why that is not known."""
        call = self._reader.calls.last
        if call is None:
            return replace(told, not_foretold="no training forward pass was seen")
        by_category = {holder.category: holder.held_bytes for holder in told.holders}
        is_forward = told.doing == Phase.FORWARD
        loop = Loop(
            call=call,
            batch_axis=self._reader.order.batch_axis,
            optimizers=tuple(self._living_optimizers()),
            autocast=self._reader.outer_dtype,
            loss=place.loss,
            kept=self._kept(place),
            keeps_gradients=is_forward and Category.GRADIENTS in by_category,
        )
        beside, constant_bytes = beside_call(loop, self._others)
        loop = replace(loop, beside=beside)
        room = memory.room - constant_bytes
        key = replace(loop, optimizers=()), room >> 20  # holds no optimizer
        if key not in self._fittings:
            self._fittings[key] = fitting(loop, room, by_category.get(NOT_REACHED, 0))
        answer = self._fittings[key]
        assumptions = list(answer.assumptions)
        if memory.is_expandable:
            assumptions.append("segments of the allocator do not grow")
        return replace(
            told,
            batch_size=answer.batch_size,
            fits=answer.fits,
            traced_batches=answer.traced_batches,
            assumptions=tuple(assumptions),
            not_foretold=answer.reason,
        )


def _with_rest(holders: list[Holder], memory: DeviceMemory) -> Iterator[Holder]:
    """The holders, and what else the allocator has, so that their sum is what it has reserved."""
    yield from holders
    rest = memory.allocated - sum(holder.held_bytes for holder in holders)
    pools = min(memory.pool_bytes, max(rest, 0))
    cached = memory.reserved - memory.allocated
    for category, size in ((POOLS, pools), (NOT_REACHED, rest - pools), (CACHED, cached)):
        if size > 0:
            yield Holder(category=category, held_bytes=size, count=0)


def place_of(error: BaseException, modules: Modules) -> Place:
    """Read the place from the traceback of the error."""
    entries = list(_entries(error))
    paths = []
    for entry in entries:
        path = _module_of(entry.tb_frame, modules)
        if path is not None:
            paths.append(path)
    line = called_at = ""
    theirs = [entry for entry in entries if _is_theirs(entry.tb_frame.f_code)]
    if theirs:
        line, called_at = _shown(theirs[-1]), _shown(theirs[0])
    is_named, kept = _naming(entries, modules)
    return Place(
        doing=_phase_of([entry.tb_frame for entry in entries], is_in_module=len(paths) > 0),
        line=line,
        called_at=called_at,
        module=paths[-1] if paths else "",
        is_named=is_named,
        kept=kept,
        loss=_loss_named([entry.tb_frame.f_code for entry in theirs]),
    )


def _phase_of(frames: Sequence[FrameType], *, is_in_module: bool) -> Phase:
    """The phase of the step in which code with these frames runs; `is_in_module` if one of them is
    of a module of the model.
    """
    codes = {frame.f_code for frame in frames}
    if BACKWARD in {code.co_name for code in codes}:
        return Phase.BACKWARD
    if is_in_module and nn.Module._call_impl.__code__ in codes:
        return Phase.FORWARD
    return Phase.OPTIMIZER if _updates(frames) else Phase.OTHER


def _entries(error: BaseException) -> Iterator[TracebackType]:
    """The frames that the error has left, the outermost first, with where they were."""
    entry = error.__traceback__
    while entry is not None:
        yield entry
        entry = entry.tb_next


def _naming(entries: Sequence[TracebackType], modules: Modules) -> tuple[bool, Kept]:
    """Whether the innermost function of the loop that does not just return what it is returned
    stores it, and how long its names last.
    """
    outside = []
    for entry in entries:
        if _module_of(entry.tb_frame, modules) is not None:
            break
        if _is_theirs(entry.tb_frame.f_code):
            outside.append(entry)
    for entry in reversed(outside):
        code = entry.tb_frame.f_code
        later = [step for step in dis.get_instructions(code) if step.offset > entry.tb_lasti]
        if later and later[0].opname == "RETURN_VALUE":
            continue
        kept = Kept.BACKWARD if "backward" in code.co_names else Kept.LOSS
        if entry is outside[0]:
            kept = Kept.STEP
        return bool(later) and later[0].opname.startswith(("STORE", "UNPACK")), kept
    return False, Kept.STEP


def _is_theirs(code: CodeType) -> bool:
    """Whether the code is neither PyTorch's nor Python's nor ours."""
    path = Path(code.co_filename)
    ours = path.is_relative_to(PACKAGE) or path.is_relative_to(TORCH)
    return not ours and not path.is_relative_to(Path(linecache.__file__).parent / "contextlib.py")


def _shown(entry: TracebackType) -> str:
    """The line of code of a traceback's entry, with its place. Paths are those within the folders
    that Python imports from: records are published, and absolute paths are private.
    """
    code, number = entry.tb_frame.f_code, entry.tb_lineno
    path = Path(code.co_filename)
    shown = path.name
    for root in sorted(map(Path, sys.path), key=lambda root: len(root.parts), reverse=True):
        if root.is_absolute() and root != Path("/") and path.is_relative_to(root):
            shown = str(path.relative_to(root))
            break
    text = linecache.getline(code.co_filename, number).strip()
    return f"{shown}:{number} in {code.co_name}: {text[:MAX_LINE]}"


def _module_of(frame: FrameType, modules: Modules) -> str | None:
    """The path of the module whose method the frame runs; None if it runs none's.

    The collector's view of a frame is asked, because a dict of its variables would stay with it.
    """
    for value in gc.get_referents(frame):
        # what an inner function uses lies in a cell
        if isinstance(value, CellType):
            value = _content(value)
        if id(value) in modules.paths and _is_method(type(value), frame.f_code):
            return modules.paths[id(value)]
    return None


def _updates(frames: Sequence[FrameType]) -> bool:
    """Whether the innermost of these frames that is an optimizer's or the loop's is an optimizer's:
    a closure that an optimizer calls is the loop's.
    """
    for frame in reversed(frames):
        code = frame.f_code
        if Path(code.co_filename).is_relative_to(TORCH / "optim"):
            return True
        if _is_theirs(code):
            values = [type(value) for value in gc.get_referents(frame)]
            optimizers = [kind for kind in values if issubclass(kind, torch.optim.Optimizer)]
            return any(_is_method(kind, code) for kind in optimizers)
    return False


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _is_method(kind: type, code: CodeType) -> bool:
    """Whether the code is that of a method of the class."""
    for base in kind.__mro__:
        function = inspect.unwrap(vars(base).get(code.co_name, _content))
        if getattr(function, "__code__", None) is code:
            return True
    return False


def _loss_named(codes: Sequence[CodeType]) -> str | None:
    """The only function of a loss that the code names, or else the only one whose module exists."""
    names = {name for code in codes for name in code.co_names}
    named = names & set(LOSSES.values())
    if not named:
        kinds = {id(type(thing)) for thing in gc.get_objects()}
        named = {function for kind, function in LOSSES.items() if id(kind) in kinds}
    return named.pop() if len(named) == 1 else None
