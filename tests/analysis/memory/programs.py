"""Simulated programs that keep their own books of what lies where, and write snapshots with
notes beside them.
"""

import copy
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from tests.analysis.memory.snapshots import (
    FIRST_TIME_US,
    MIB,
    NOTHING,
    Allocator,
    snapshot_of,
    some_size,
    write,
)

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


SITE = "/opt/env/lib/python3.12/site-packages"
INNER = (
    ("Linear.forward", f"{SITE}/torch/nn/modules/linear.py"),
    ("LlamaMLP.forward", f"{SITE}/transformers/models/llama/modeling_llama.py"),
    ("Linear4bit.forward", "/opt/src/bitsandbytes/bitsandbytes/nn/modules.py"),
    ("ParallelMLP.forward", "/workspace/Megatron-LM/megatron/core/mlp.py"),
    ("forward", "/sgl-workspace/sglang/python/sglang/srt/layers/linear.py"),
    ("Trainer.compute_loss", r"C:\\env\\Lib\\site-packages\\transformers\\trainer.py"),
    ("apply", "/usr/lib/python3/dist-packages/peft/tuners/lora.py"),
    ("call", "/tmp/torchinductor_u/ab/cabc.py"),
    ("at::linear", "??"),
)
"""Calls in libraries, installed in many ways."""
OUTER = (
    ("Net.forward", "/home/u/net.py"),
    ("step", "/home/u/work/run.py"),
    ("cell", "/tmp/ipykernel_7/123.py"),
)


@dataclass
class DrawnStack:
    """A stack of calls, and its place and module as they were drawn."""

    frames: list[dict[str, Any]]
    place: str = ""
    module: str = ""


def draw_stack(rng: random.Random) -> DrawnStack:
    """Libraries inside, then the program; sometimes no Python at all, as in backward."""
    if rng.random() < 0.3:
        return DrawnStack([{"name": "engine", "filename": "??", "line": 0}] * rng.randrange(2))
    calls = [*rng.sample(INNER, rng.randrange(4)), *rng.sample(OUTER, rng.randrange(1, 3))]
    frames = [
        {"name": name, "filename": file, "line": rng.randrange(1, 99)} for name, file in calls
    ]
    modules = [name for name, _ in calls if name.endswith(".forward")]
    place = next(frame for frame, call in zip(frames, calls, strict=True) if call in OUTER)
    file = "/".join(place["filename"].split("/")[-2:])
    module = modules[0].split(".")[0] if modules else ""
    return DrawnStack(frames, f"{file}:{place['line']} {place['name']}", module)


@dataclass
class DrawnSnapshot:
    """A snapshot of any program, with the truth beside it."""

    seed: int
    devices: list[Allocator] = field(default_factory=list)
    stack_of: dict[int, DrawnStack] = field(default_factory=dict)
    """By the identity of the list of frames."""
    ranges_at: list[str] = field(default_factory=list)
    """The ranges that are open at each event of the only device."""
    annotations: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.is_timed, self.has_frames = rng.random() < 0.7, rng.random() < 0.7
        # of its own seed, so that the rest is drawn as ever
        self.clock = random.Random(-self.seed).choice(["good", "good", "back", "still"])
        self.stacks = [draw_stack(rng) for _ in range(6)]
        self.stack_of = {id(stack.frames): stack for stack in self.stacks}
        is_expandable = rng.random() < 0.4
        for device in range(rng.choice([1, 1, 2, 3])):
            limit = rng.choice([None, 150 * MIB, 400 * MIB])
            allocator = Allocator(limit, is_expandable, base=(device + 1) << 44)
            self.devices.append(allocator)
            for _ in range(rng.randrange(4)):
                allocator.malloc(some_size(rng))
            allocator.record()
        for device in self.devices:
            self._use(device, rng)

    def _use(self, allocator: Allocator, rng: random.Random) -> None:
        """Allocate and free in pools, with labels, within ranges."""
        addresses: list[int] = []
        names: list[str] = []
        for _ in range(rng.randrange(20, 120)):
            allocator.pool = rng.choice([(0, 0), (0, 0), (0, 0), (0, 1), (7, 0)])
            allocator.metadata = rng.choice(["", "", "", "experts", "cache"])
            frames = rng.choice(self.stacks).frames if self.has_frames else None
            dice = rng.random()
            if dice < 0.1:
                self._annotate(allocator, names, rng)
            elif dice < 0.13:
                allocator.empty_cache(frames)
            elif addresses and dice < 0.45:
                allocator.free(addresses.pop(rng.randrange(len(addresses))), frames)
            elif address := allocator.malloc(some_size(rng), frames=frames):
                addresses.append(address)
            assert allocator.events is not None
            missing = len(allocator.events) - len(self.ranges_at)
            self.ranges_at += [" > ".join(names)] * missing

    def _annotate(self, allocator: Allocator, names: list[str], rng: random.Random) -> None:
        """Open a range, or close the innermost."""
        allocator.time_us += 1
        is_start = not names or rng.random() < 0.5
        if is_start:
            names.append(rng.choice(["forward", "Optimizer.step#AdamW.step", "layer"]))
        name = names[-1] if is_start else names.pop()
        stage = "START" if is_start else "END"
        entry = {"name": name, "stage": stage, "time_us": allocator.time_us, "device": 0}
        self.annotations.append(entry)

    @property
    def has_times(self) -> bool:
        """Whether the file tells when something happened."""
        return self.is_timed and self.clock == "good"

    def write(self, folder: Path) -> Path:
        content = copy.deepcopy(snapshot_of(*self.devices))
        if len(self.devices) == 1:
            content["external_annotations"] = self.annotations
        for trace in content["device_traces"]:
            for row, event in enumerate(trace):
                if self.clock == "still":
                    event["time_us"] = FIRST_TIME_US
                elif self.clock == "back" and 2 * row >= len(trace):
                    event["time_us"] -= 10**7
                if not self.is_timed:
                    event.pop("time_us", None)
        return write(folder / "drawn.pickle", content)
