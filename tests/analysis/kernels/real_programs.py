"""Small PyTorch programs that are drawn, run under torch.profiler, and count what they do.

A simulation may agree with its reader; these do not. Their truth is what the program counted, what
the host's clock showed around each step, and on a GPU what events of CUDA measured.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from tests.analysis.kernels.drawn_plans import STYLES, Part

WARMUP = 1
"""Steps that the profiler does not record."""


@dataclass(frozen=True, kw_only=True)
class RealPlan:
    """A program to run."""

    seed: int
    style: str
    trains: bool
    steps: int
    micro_batches: int
    layers: int
    width: int
    batch: int
    loads: bool
    """A DataLoader gives the batches, whose range PyTorch records."""
    slept_s: float
    """How long the loader sleeps for each batch."""
    zero_grad: str
    sets_to_none: bool
    optimizer: str
    """`adamw`, `sgd`, or `plain` for a loop over the parameters, which has no range."""
    clips: bool
    checkpoints: bool
    counts_steps: bool
    """The profiler's own steps are in the file."""
    without_gradients: str
    """What a training step computes without gradients: an `evaluation` of several batches at its
    beginning, or a `teacher` beside its model.
    """
    infers: bool
    """By torch.inference_mode, in the place of torch.no_grad."""


@dataclass
class RealTruth:
    """What a run counted and measured."""

    clocks: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Each recorded step by the host's clock, read inside of its range and outside, for each way
    in which the file names steps.
    """
    activations: Counter[str] = field(default_factory=Counter)
    """Calls of GELU and of its backward in the recorded steps by phase: on any device each is one
    operator or kernel, as products of matrices are not.
    """
    slept_ns: int = 0
    device_ns: dict[str, list[int]] = field(default_factory=dict)
    """For each phase, its time on the device in each recorded step, by events."""


def draw_real(seed: int) -> RealPlan:
    """The program of this seed."""
    random_ = random.Random(seed)
    pick, chance = random_.choice, random_.random
    trains = chance() < 0.8
    return RealPlan(
        seed=seed,
        style=pick(("none", "ours", "phases", "hashes", "iteration", "deepspeed")),
        trains=trains,
        steps=random_.randint(2, 4),
        micro_batches=pick((1, 1, 2, 3)) if trains else 1,
        layers=random_.randint(1, 3),
        width=pick((32, 64, 128)),
        batch=pick((8, 32)),
        loads=chance() < 0.6,
        slept_s=pick((0.0, 0.0, 0.003)),
        zero_grad=pick(("", "first", "last")),
        sets_to_none=chance() < 0.7,
        optimizer=pick(("adamw", "sgd", "plain")),
        clips=chance() < 0.3,
        checkpoints=chance() < 0.3,
        counts_steps=chance() < 0.6,
        without_gradients=pick(("", "evaluation", "teacher")) if trains else "",
        infers=chance() < 0.5,
    )


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class _Model(nn.Module):
    def __init__(self, plan: RealPlan) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block(plan.width) for _ in range(plan.layers)])
        self.head = nn.Linear(plan.width, 10)
        self.checkpoints = plan.checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x)


class _Batches(Dataset):
    """Random rows; the first of each batch takes as long as the plan says."""

    def __init__(self, plan: RealPlan, truth: RealTruth) -> None:
        self.plan, self.truth = plan, truth

    def __len__(self) -> int:
        return self.plan.batch * self.plan.micro_batches * (self.plan.steps + WARMUP)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        if self.plan.slept_s and row % self.plan.batch == 0:
            time.sleep(self.plan.slept_s)
            if row >= self.plan.batch * self.plan.micro_batches * WARMUP:
                self.truth.slept_ns += int(self.plan.slept_s * 1e9)
        return torch.full((self.plan.width,), row / 100), row % 10


class _Program:
    """One program, its model and what it counts."""

    def __init__(self, plan: RealPlan, device: str) -> None:
        torch.manual_seed(plan.seed)
        self.plan, self.device, self.truth = plan, device, RealTruth()
        self.model = _Model(plan).to(device)
        parameters = list(self.model.parameters())
        makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
            "adamw": torch.optim.AdamW,
            "sgd": torch.optim.SGD,
        }
        maker = makers.get(plan.optimizer)
        self.optimizer = None if maker is None else maker(parameters, lr=1e-3)
        self.batches = self._batches()
        self.is_recorded = False
        self.events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        plan = self.plan
        if plan.loads:
            yield from DataLoader(_Batches(plan, self.truth), batch_size=plan.batch)
        while True:
            yield torch.rand(plan.batch, plan.width), torch.arange(plan.batch) % 10

    @contextmanager
    def part(self, part: Part, step: int = 0) -> Iterator[None]:
        """A part of the step, in a range if the style names it, timed on a GPU."""
        name = STYLES[self.plan.style].get(part)
        with ExitStack() as stack:
            # the profiler writes its own steps
            if name is not None and not name.startswith("ProfilerStep"):
                stack.enter_context(record_function(name.format(n=step)))
            if self.device != "cuda":
                yield
                return
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            if self.is_recorded:
                self.events.setdefault(part, []).append((begin, end))

    def count(self, phase: Part, activations: int) -> None:
        if self.is_recorded:
            self.truth.activations[phase] += activations

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with self.part(Part.FORWARD):
            logits = self.model(x)
            self.count(Part.FORWARD, self.plan.layers)
            if self.plan.without_gradients == "teacher":
                has_range = Part.FORWARD in STYLES[self.plan.style]
                self.compute_without_gradients(x, Part.FORWARD if has_range else Part.EVALUATION)
            is_apart = Part.LOSS in STYLES[self.plan.style]
            if not is_apart:
                return nn.functional.cross_entropy(logits, y)
        with self.part(Part.LOSS):
            return nn.functional.cross_entropy(logits, y)

    def compute_without_gradients(self, x: Tensor, phase: Part) -> None:
        with torch.inference_mode() if self.plan.infers else torch.no_grad():
            self.model(x)
        self.count(phase, self.plan.layers)

    def backward(self, loss: Tensor) -> None:
        with self.part(Part.BACKWARD):
            loss.backward()
        again = self.plan.layers if self.plan.checkpoints else 0
        self.count(Part.BACKWARD, self.plan.layers + again)

    def update(self) -> None:
        if self.plan.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        with self.part(Part.OPTIMIZER):
            if self.optimizer is not None:
                self.optimizer.step()
                return
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.sub_(parameter.grad, alpha=1e-3)

    def zero_grad(self) -> None:
        target = self.model if self.optimizer is None else self.optimizer
        target.zero_grad(set_to_none=self.plan.sets_to_none)

    def step(self) -> None:
        plan = self.plan
        if not plan.trains:
            x, y = next(self.batches)
            with torch.no_grad():
                self.forward(x.to(self.device), y.to(self.device))
            return
        if plan.without_gradients == "evaluation":
            for _ in range(3):
                x = torch.rand(plan.batch, plan.width).to(self.device)
                self.compute_without_gradients(x, Part.EVALUATION)
        for micro in range(plan.micro_batches):
            x, y = next(self.batches)
            if plan.zero_grad == "first" and micro == 0:
                self.zero_grad()
            self.backward(self.forward(x.to(self.device), y.to(self.device)))
        self.update()
        if plan.zero_grad == "last":
            self.zero_grad()


def run_real(plan: RealPlan, path: Path, device: str = "cpu") -> RealTruth:
    """Run the program under the profiler, and write the trace to the path."""
    program = _Program(plan, device)
    truth = program.truth
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    phases = schedule(wait=0, warmup=WARMUP, active=plan.steps, repeat=1)
    profiler = profile(activities=activities, schedule=phases if plan.counts_steps else None)
    first = 0 if plan.counts_steps else WARMUP
    for _ in range(first):
        program.step()
    edges: list[tuple[int, int]] = []
    with profiler:
        for number in range(first, WARMUP + plan.steps):
            program.is_recorded = number >= WARMUP
            _one_step(program, number)
            if plan.counts_steps:
                before = time.perf_counter_ns()
                profiler.step()
                edges.append((before, time.perf_counter_ns()))
        if device == "cuda":
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    if plan.counts_steps:  # a step lasts from one call of the profiler to the next
        truth.clocks["ProfilerStep"] = [
            (end[0] - begin[1], end[1] - begin[0]) for begin, end in pairwise(edges)
        ]
    for part, pairs in program.events.items():
        truth.device_ns[part] = [int(begin.elapsed_time(end) * 1e6) for begin, end in pairs]
    return truth


def _one_step(program: _Program, number: int) -> None:
    truth = program.truth
    outer = time.perf_counter_ns()
    with program.part(Part.STEP, number):
        inner = time.perf_counter_ns()
        program.step()
        inner = time.perf_counter_ns() - inner
    outer = time.perf_counter_ns() - outer
    if program.is_recorded and Part.STEP in STYLES[program.plan.style]:
        truth.clocks.setdefault("range", []).append((inner, outer))
