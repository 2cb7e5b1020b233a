"""Simulated programs that keep their own books of what lies where, and write snapshots with
notes beside them.
"""

import random
from collections import Counter
from pathlib import Path

from cs336.analysis.memory.notes import (
    Mark,
    MemoryNotes,
    Position,
    Sighting,
    SightingKind,
    notes_path,
    write_notes,
)
from cs336.config import ModelConfig
from tests.analysis.memory.snapshots import MIB, NOTHING, Allocator, snapshot_of, write

BEFORE = -1
MODEL = ModelConfig(
    vocab_size=1000, context_length=64, d_model=96, d_ff=320, num_layers=2, num_heads=6
)
BATCH = 3
STACK = [
    {
        "name": "softmax",
        "filename": "/opt/env/lib/python3.12/site-packages/torch/nn/functional.py",
        "line": 2133,
    },
    {"name": "at::softmax", "filename": "??", "line": 0},
    {
        "name": "wrapped",
        "filename": "/opt/env/lib/python3.12/site-packages/jaxtyping/_decorator.py",
        "line": 5,
    },
    {"name": "attend", "filename": "/home/user/project/lm/model.py", "line": 17},
    {"name": "main", "filename": "/home/user/project/lm/train.py", "line": 3},
]


class Program(Allocator):
    """An allocator that counts as PyTorch's does, and remembers since which event each address
    is in use.
    """

    def __init__(self, **options: int) -> None:
        super().__init__(**options)
        self.num_allocations = self.num_frees = 0
        self.born: dict[int, int] = {}
        self.labels: dict[int, str] = {}
        """By address, for those in use: the category."""
        self.marks: list[Mark] = []
        self.sightings: list[Sighting] = []
        self.books: list[Counter[str]] = []
        """By mark: bytes of each category."""
        self.num_blocks: list[Counter[str]] = []
        self.requested: list[Counter[str]] = []
        """By mark: bytes of each category that were asked for."""
        self.moments: list[int] = []
        """Of each mark: events that had happened."""
        self.start = self.position

    @property
    def position(self) -> Position:
        return Position(allocations=self.num_allocations, frees=self.num_frees)

    def record(self) -> None:
        super().record()
        self.start = self.position
        self.born = dict.fromkeys(self.born, BEFORE)

    def malloc(
        self, requested: int, stream: int = 0, frames: list | None = NOTHING, label: str = ""
    ) -> int | None:
        address = super().malloc(requested, stream, frames)
        if address is not None:
            self.num_allocations += 1
            self.born[address] = BEFORE if self.events is None else len(self.events) - 1
            self.labels[address] = label
        return address

    def free(
        self, address: int, frames: list | None = NOTHING, is_used_elsewhere: bool = False
    ) -> None:
        self.num_frees += 1
        super().free(address, frames, is_used_elsewhere)

    def mark(self, step: int, name: str) -> None:
        counts = self._counts
        self.marks.append(
            Mark(
                step=step,
                name=name,
                position=self.position,
                allocated_bytes=counts["allocated"],
                requested_bytes=counts["requested"],
                reserved_bytes=counts["reserved"],
                peak_allocated_bytes=max(truth.allocated for truth in self.truth),
            )
        )
        in_use = [block for block in self.blocks.values() if block.state == "active_allocated"]
        self.moments.append(len(self.events or []))
        self.books.append(Counter())
        self.requested.append(Counter())
        for block in in_use:
            self.books[-1][self.labels[block.address]] += block.size
            self.requested[-1][self.labels[block.address]] += block.requested
        self.num_blocks.append(Counter(self.labels[block.address] for block in in_use))

    def see(
        self,
        kind: SightingKind,
        name: str,
        address: int,
        shape: tuple[int, ...] = (),
        dtype: str = "float32",
    ) -> None:
        num_bytes = next(
            b.requested for b in self.blocks.values() if 0 <= address - b.address < b.size
        )
        self.sightings.append(
            Sighting(
                kind=kind,
                name=name,
                address=address,
                num_bytes=num_bytes,
                shape=shape,
                dtype=dtype,
                position=self.position,
            )
        )

    def notes(self) -> MemoryNotes:
        return MemoryNotes(
            device=0,
            start=self.start,
            end=self.position,
            marks=tuple(self.marks),
            sightings=tuple(self.sightings),
            reserved_bytes=self._counts["reserved"],
            used_on_device_bytes=self._counts["reserved"] + 777 * MIB,
        )

    def write(self, folder: Path) -> Path:
        path = write(folder / "snapshot.pickle", snapshot_of(self))
        write_notes(self.notes(), notes_path(path))
        return path


class Training:
    """Steps of a model with two blocks; what each allocation holds is written down as it is
    made.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.program = Program(limit_bytes=limit_bytes)
        new = self.program.malloc
        self.weights = [new(96 * 320 * 4, label="parameters") for _ in range(2)]
        self.moments = [new(96 * 320 * 4, label="optimizer state") for _ in range(4)]
        self.mask = new(64 * 64, label="buffers")
        self.loss = new(4, label="temporary")  # of the last step before: freed in the recording
        new(8 * MIB, label="held throughout")
        self.program.record()
        self.rng = random.Random(0)
        self.saved_sizes: list[list[int]] = []
        for block, weight in enumerate(self.weights):
            self.program.see(
                SightingKind.PARAMETER, f"layers.{block}.ffn.w1.weight", weight, (320, 96)
            )
        self.program.see(SightingKind.BUFFER, "future", self.mask, (64, 64), "bool")

    def temporaries(self) -> None:
        for _ in range(3):
            self.program.free(
                self.program.malloc(self.rng.randrange(1, 3 * MIB), frames=STACK, label="temporary")
            )

    def forward(self, step: int) -> list[int]:
        program, saved = self.program, []
        program.mark(step, "start")
        for block in range(2):
            around = f"measure > step > forward > block.{block}"
            self.temporaries()
            program.see(SightingKind.SAVED, f"{around} > attention", self.mask, (64, 64), "bool")
            scores = program.malloc(
                BATCH * 6 * 64 * 64 * 4, frames=STACK, label="saved activations"
            )
            for _ in range(2):  # two operators save it
                program.see(
                    SightingKind.SAVED,
                    f"{around} > attention > attention.softmax",
                    scores,
                    (BATCH, 6, 64, 64),
                )
            both = program.malloc(2 * BATCH * 64 * 96 * 4, frames=[], label="saved activations")
            half = (BATCH * 6, 64, 16)
            program.see(SightingKind.SAVED, f"{around} > attention > attention.scores", both, half)
            copy = program.malloc(96 * 320 * 2, label="autocast copies")
            program.see(
                SightingKind.AUTOCAST_COPY,
                f"layers.{block}.ffn.w1.weight",
                copy,
                (96, 320),
                "bfloat16",
            )
            gathered = program.malloc(96 * 320 * 2, label="parameters")
            program.see(SightingKind.GATHERED, f"layers.{block}", gathered, (96 * 320,), "bfloat16")
            saved += [scores, both, copy, gathered]
            self.saved_sizes.append([program.blocks[scores].size, program.blocks[both].size])
        if self.loss:
            program.free(self.loss)
        self.loss = program.malloc(4, label="temporary")
        program.mark(step, "forward")
        return saved

    def step(self, step: int) -> None:
        program, saved = self.program, self.forward(step)
        gradients = []
        for block in (1, 0):
            gradients.append(program.malloc(96 * 320 * 4, label="gradients"))
            for address in saved[4 * block : 4 * block + 4]:
                program.free(address)
        program.mark(step, "backward")
        for block, gradient in zip((1, 0), gradients, strict=True):
            program.see(SightingKind.GRADIENT, f"layers.{block}.ffn.w1.weight", gradient, (320, 96))
        self.temporaries()
        for gradient in gradients:
            program.free(gradient)
        program.mark(step, "optimizer")

    def end(self, folder: Path) -> Path:
        for index, moment in enumerate(self.moments):
            name = f"{('exp_avg', 'exp_avg_sq')[index % 2]} of layers.{index // 2}.ffn.w1.weight"
            self.program.see(SightingKind.OPTIMIZER_STATE, name, moment, (320, 96))
        return self.program.write(folder)
