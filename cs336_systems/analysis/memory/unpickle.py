"""Reads a pickle that holds nothing but plain data: a machine of its own, which knows no globals and calls nothing.

Python's unpickler, with `find_class` closed, still runs out of memory, hangs or crashes on files of a few bytes: an
index of its memo may be any number, and a tuple that is a key of a dict is hashed to whatever depth it has. Here a dict
has only strings as keys, objects are numbered one after the other, and their number is bound to the size of the file.
"""

import pickletools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from cs336_systems.analysis.columns import ProfileError

MAX_PROTOCOL = 5
MAX_DEPTH = 1000
"""Of containers that are begun and not yet filled."""
MAX_STACK = 2**20
"""Objects that wait for their container. Pickles hand them over a thousand at a time."""
BYTES_PER_CONTAINER = 8
"""Of the file, on average, for each list, dict or tuple. Those of a snapshot take thirty and more."""
FREE_CONTAINERS = 1000
PADDING = 512
"""Zeros after the content, which are no opcode: whoever reads a few bytes ahead finds the end there."""

PASSED_OVER = object()
"""In the memo, in the place of an object that was not read."""
RUNS_CODE = {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX",
             "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"}  # fmt: skip

Operation = Callable[["Machine"], object]
Operations = list[Operation | None]


class Reference:
    """An object of the pickle that was passed over: known by its number in the memo, and read by whoever needs it."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Shortcut(Protocol):
    """Reads many items of a list at once."""

    def __call__(self, machine: "Machine", items: list[Any]) -> None:
        """Continue `items` with what follows the mark at which the machine stands, as far as this is known.

        Whoever reads anything moves the machine behind it, where a batch of the list is open.
        """


class Machine:
    """Executes the opcodes of one pickle. `load` gives its object, or raises ProfileError."""

    def __init__(self, path: Path, content: bytearray, shortcut: Shortcut | None = None) -> None:
        """`content` ends in `PADDING` zeros; the `shortcut` is offered every list of which a batch has been read."""
        self.path = path
        self.content = content
        self.size = len(content) - PADDING
        self.position = 0
        self.memo: list[Any] = []
        """Objects in the order of their numbers, and PASSED_OVER."""
        self._list_numbers: dict[int, int] = {}
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._shortcut = shortcut
        self._num_containers = 0
        self._max_containers = FREE_CONTAINERS + self.size // BYTES_PER_CONTAINER

    def load(self) -> Any:  # noqa: ANN401
        """The object that the pickle holds: dicts, lists, tuples, strings, numbers, booleans and None."""
        if (code := self._run(_OPERATIONS)) != _STOP:
            raise self._refusal(code)
        if self._marks or len(self._stack) != 1:
            raise self.error(f"needed one object at the end, got {len(self._stack)} and {len(self._marks)} open marks")
        return self._stack.pop()

    def load_dict(self, position: int) -> Any:  # noqa: ANN401
        """The dict that begins at `position`; the machine stands behind it then."""
        stack, marks = self._stack, self._marks
        self._stack, self._marks, self.position = [], [], position
        while self.position == position or self._marks or len(self._stack) != 1:
            if (code := self._run(_UP_TO_SETITEMS)) != _SETITEMS:
                raise self._refusal(code)
            self.position += 1
            self._set(self._since_mark())
        (found,) = self._stack
        self._stack, self._marks = stack, marks
        return found

    def open_batch(self) -> None:
        """The machine stands within a batch of the list on top: behind its mark, and behind some of its items."""
        self._mark()

    def number_of_list(self, found: list[Any]) -> int:
        """The number in the memo of a list that the machine has read."""
        if id(found) not in self._list_numbers:  # a pickle may leave objects out of its memo
            self._list_numbers[id(found)] = len(self.memo)
            self.memo.append(found)
        return self._list_numbers[id(found)]

    def remembered(self, number: int) -> Any:  # noqa: ANN401
        """The object with this number in the memo, or PASSED_OVER."""
        return self.memo[number] if number < len(self.memo) else PASSED_OVER

    def references(self, code: bytes) -> list[Any]:
        """The objects that these opcodes refer to, which are all references to the memo."""
        machine = Machine(self.path, bytearray(code) + bytes(PADDING))
        machine.memo = self.memo
        machine._run(_OPERATIONS)
        return machine._stack

    def _run(self, operations: Operations) -> int:
        """Execute up to the first opcode that is not among the operations."""
        content = self.content
        while (operation := operations[code := content[self.position]]) is not None:
            self.position += 1
            operation(self)
        return code

    def error(self, problem: str) -> ProfileError:
        """What is wrong here, which is the end of the file where the machine went beyond it."""
        if self.position > self.size:
            return self._truncated()
        return ProfileError(self.path, f"byte {self.position} of the pickle: {problem}; no memory snapshot")

    def _truncated(self) -> ProfileError:
        return ProfileError(self.path, f"truncated after {self.size} bytes: copy it again or dump it again")

    def _refusal(self, code: int) -> ProfileError:
        if self.position >= self.size:
            return self._truncated()
        if (name := _NAMES.get(code)) is None:
            return self.error(f"opcode {code:#04x} is unknown")
        if name in RUNS_CODE:
            return self.error(f"opcode {name} would run code of others, so nothing was loaded")
        return self.error(f"opcode {name} is for data that no snapshot holds")

    def _take(self, num_bytes: int) -> bytearray:
        end = self.position + num_bytes
        if end > self.size:
            raise self._truncated()
        taken = self.content[self.position : end]
        self.position = end
        return taken

    def _number(self, num_bytes: int) -> int:
        begin = self.position
        self.position += num_bytes  # into the padding at most, where there is no opcode
        return int.from_bytes(self.content[begin : self.position], "little")

    def _push(self, thing: object) -> None:
        self._stack.append(thing)
        self._check_stack()

    def _check_stack(self) -> None:
        if len(self._stack) > MAX_STACK:
            raise self.error(f"more than {MAX_STACK} objects wait for a container")

    def _last(self) -> Any:  # noqa: ANN401
        if not self._stack:
            raise self.error("needed an object that is not there")
        return self._stack[-1]

    def _pop(self) -> Any:  # noqa: ANN401
        last = self._last()
        self._stack.pop()
        return last

    def _push_container(self, container: object) -> None:
        self._num_containers += 1
        if self._num_containers > self._max_containers:
            raise self.error(f"more than {self._max_containers} lists, dicts and tuples in {self.size} bytes")
        self._push(container)

    def _mark(self) -> None:
        if len(self._marks) >= MAX_DEPTH:
            raise self.error(f"nested more than {MAX_DEPTH} deep")
        self._marks.append(len(self._stack))

    def _since_mark(self) -> list[Any]:
        if not self._marks:
            raise self.error("needed a mark that is not there")
        begin = self._marks.pop()
        taken = self._stack[begin:]
        del self._stack[begin:]
        return taken

    def _top(self, kind: type) -> Any:  # noqa: ANN401
        if type(last := self._last()) is not kind:
            raise self.error(f"needed a {kind.__name__}, got a {type(last).__name__}")
        return last

    def _protocol(self) -> None:
        if (protocol := self._number(1)) > MAX_PROTOCOL:
            raise self.error(f"needed protocol {MAX_PROTOCOL} or lower, got {protocol}")

    def _long(self, size_bytes: int) -> None:
        if (num_bytes := self._number(size_bytes)) > 255:
            raise self.error(f"a whole number of {num_bytes} bytes")
        self._push(int.from_bytes(self._take(num_bytes), "little", signed=True))

    def _text(self, size_bytes: int) -> None:
        self._push(self._take(self._number(size_bytes)).decode(errors="replace"))

    def _float(self) -> None:
        self._push(struct.unpack(">d", self._take(8))[0])

    def _byte(self) -> None:
        self._push(self.content[self.position])
        self.position += 1

    def _signed(self) -> None:
        self._push(int.from_bytes(self._take(4), "little", signed=True))

    def _tuple(self, length: int) -> None:
        items = [self._pop() for _ in range(length)]
        self._push_container(tuple(reversed(items)))

    def _memoise(self) -> None:
        thing = self._last()
        if type(thing) is list:
            self._list_numbers[id(thing)] = len(self.memo)
        self.memo.append(thing)

    def _put(self, size_bytes: int) -> None:
        if (number := self._number(size_bytes)) != len(self.memo):
            raise self.error(f"needed memo index {len(self.memo)}, got {number}")
        self._memoise()

    def _gets(self) -> None:
        """All the references to the memo that stand here: most of a snapshot is lists of these."""
        content, memo, stack, position = self.content, self.memo, self._stack, self.position - 1
        for _ in range(MAX_STACK):
            if (code := content[position]) == _LONG_GET:
                (number,) = _unpack_number(content, position + 1)
                position += 5
            elif code == _GET:
                number = content[position + 1]
                position += 2
            else:
                break
            if number >= len(memo):
                raise self.error(f"memo index {number} of {len(memo)}")
            thing = memo[number]
            stack.append(Reference(number) if thing is PASSED_OVER else thing)
        self.position = position
        self._check_stack()

    def _append(self) -> None:
        item = self._pop()
        self._top(list).append(item)

    def _appends(self) -> None:
        items = self._since_mark()
        target = self._top(list)
        target.extend(items)
        if self._shortcut and self.content[self.position] == _MARK:
            self._shortcut(self, target)

    def _set(self, items: list[Any]) -> None:
        target = self._top(dict)
        keys = items[::2]
        if len(items) % 2 or not {str}.issuperset(map(type, keys)):
            raise self.error("needed strings as keys, each with a value")
        target.update(zip(keys, items[1::2], strict=True))

    def _set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._set([key, value])


_MARK, _STOP, _SETITEMS, _GET, _LONG_GET = b"(.uhj"
_unpack_number = struct.Struct("<I").unpack_from
_PLAIN: dict[str, Operation] = {
    "PROTO": Machine._protocol,
    "FRAME": lambda machine: machine._take(8),
    "MARK": Machine._mark,
    "NONE": lambda machine: machine._push(None),
    "NEWTRUE": lambda machine: machine._push(True),
    "NEWFALSE": lambda machine: machine._push(False),
    "BININT": Machine._signed,
    "BININT1": Machine._byte,
    "BININT2": lambda machine: machine._push(machine._number(2)),
    "LONG1": lambda machine: machine._long(1),
    "LONG4": lambda machine: machine._long(4),
    "BINFLOAT": Machine._float,
    "SHORT_BINUNICODE": lambda machine: machine._text(1),
    "BINUNICODE": lambda machine: machine._text(4),
    "BINUNICODE8": lambda machine: machine._text(8),
    "EMPTY_DICT": lambda machine: machine._push_container({}),
    "EMPTY_LIST": lambda machine: machine._push_container([]),
    "EMPTY_TUPLE": lambda machine: machine._push(()),
    "TUPLE": lambda machine: machine._push_container(tuple(machine._since_mark())),
    "TUPLE1": lambda machine: machine._tuple(1),
    "TUPLE2": lambda machine: machine._tuple(2),
    "TUPLE3": lambda machine: machine._tuple(3),
    "APPEND": Machine._append,
    "APPENDS": Machine._appends,
    "SETITEM": Machine._set_item,
    "SETITEMS": lambda machine: machine._set(machine._since_mark()),
    "MEMOIZE": Machine._memoise,
    "BINPUT": lambda machine: machine._put(1),
    "LONG_BINPUT": lambda machine: machine._put(4),
    "BINGET": Machine._gets,
    "LONG_BINGET": Machine._gets,
}
"""What plain data needs, in protocols 2 to 5."""
_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_OPERATIONS: Operations = [_PLAIN.get(_NAMES.get(code, "")) for code in range(256)]
_UP_TO_SETITEMS = [None if code == _SETITEMS else operation for code, operation in enumerate(_OPERATIONS)]
