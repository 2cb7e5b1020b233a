"""Training loops drawn at random, with the truth of their phases beside them.

`python -m tests.watched.drawn_loops FIRST COUNT` runs loops of other seeds and says what is false.
"""

import contextlib
import copy
import faulthandler
import io
import os
import pickle
import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader

from cs336 import watch
from cs336.config import Phase, Precision
from tests.watched.drawn_models import MODELS, VOCABULARY, WIDTH, Base, Clock

STEPS, WARMUP = 6, 2
PRECISIONS = {
    "fp32": Precision.FP32,
    "autocast": Precision.BF16,
    "autocast within": Precision.BF16,
    "parameters": Precision.BF16,
}
LOADERS = ("none", "between", "within", "workers' batches", "own iterator")
LOOPS = ("plain", "every", "lbfgs", "gan", "grad", "scaler", "teacher", "foreign", "closure")
COMPILED = ("before", "after", "in place")
FAULTS = ("forward", "backward", "hook", "loss", "keyboard", "memory", "nan")
EXTRAS = (
    "evaluation",
    "generation",
    "evaluation mode",
    "save",
    "average",
    "thread",
    "fork",
    "report",
    "second loop",
    "skip",
    "hooks of theirs",
)


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What is drawn of a loop."""

    seed: int
    model: str
    loop: str
    wrapper: str
    precision: str
    loader: str
    micro_batches: int
    checkpoint: bool | None
    extras: frozenset[str]
    fault: str | None
    fault_step: int
    forward_ms: int
    backward_ms: int
    loss_ms: int
    update_ms: int
    load_ms: int
    other_ms: int


def drawn(seed: int) -> Draw:
    """The loop of this seed."""
    chance = random.Random(seed)
    model, loop = chance.choice(list(MODELS)), chance.choice(LOOPS)
    wrappers = ["none"] * 70 + ["data parallel", "accelerate"] * 6 + list(COMPILED)
    wrapper = chance.choice(wrappers)
    precision = chance.choice(list(PRECISIONS))
    if model in ("bare", "energy") or loop in ("lbfgs", "scaler"):
        precision = "fp32"
    if wrapper == "accelerate":
        precision = "autocast within"
    if loop == "gan" or model == "bare":
        wrapper, precision = "none", "fp32"
    compiled = wrapper in COMPILED
    # a function within another one has no pickle
    extras = [extra for extra in EXTRAS if (model, extra) != ("closing", "save")]
    milliseconds = [chance.randint(1, 40) for _ in range(6)]
    return Draw(
        seed=seed,
        model="floats" if loop == "gan" or (compiled and model == "energy") else model,
        loop=loop,
        wrapper=wrapper,
        precision=precision,
        loader=chance.choice(LOADERS),
        micro_batches=chance.choice([1, 1, 2, 3]),
        checkpoint=None if compiled else chance.choice([None, None, False, True]),
        extras=frozenset(extra for extra in extras if chance.random() < 0.12),
        fault=chance.choice(FAULTS) if chance.random() < 0.4 and not compiled else None,
        fault_step=chance.randrange(STEPS),
        forward_ms=milliseconds[0],
        backward_ms=milliseconds[1],
        loss_ms=milliseconds[2],
        update_ms=milliseconds[3],
        load_ms=milliseconds[4],
        other_ms=milliseconds[5],
    )


class Unwatched:
    """Stands for `watch` in the loop that is not watched."""

    def step(self):
        return contextlib.nullcontext()

    def data(self, batches):
        return iter(batches)

    def remove(self):
        return None


class Batches(torch.utils.data.Dataset):
    """Batches that take time to load."""

    def __init__(self, loop):
        self.loop = loop

    def __len__(self):
        return 100

    def __getitem__(self, index):
        loop = self.loop
        with loop.clock.within(Phase.DATA) if loop.loads_seen else contextlib.nullcontext():
            loop.clock.spend(loop.draw.load_ms)
        return loop.batch(index)


class Foreign:
    """An optimizer that is none of PyTorch's."""

    def __init__(self, parameters, clock, draw):
        self.parameters, self.clock, self.draw = list(parameters), clock, draw

    def step(self):
        self.clock.spend(self.draw.update_ms)
        with torch.no_grad():
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None


def slow(kind, draw, clock, **settings):
    """An optimizer of the kind whose step takes time."""

    class Updated(kind):
        def step(self, closure=None):
            with clock.within(Phase.OPTIMIZER):
                clock.spend(draw.update_ms)
                return super().step(closure)

    return lambda parameters: Updated(parameters, **settings)


class Loop:
    """A drawn loop: run it watched and not, and compare."""

    def __init__(self, draw, output):
        self.draw, self.clock, self.output = draw, Clock(), output
        self.losses, self.errors, self.lengths, self.loads_seen = [], [], set(), True
        self.all_watched = []
        self.chance, self.broken = random.Random(draw.seed + 1), None
        torch.manual_seed(draw.seed)
        self.model = MODELS[draw.model](self.clock, draw)
        self.bare = nn.Parameter(torch.randn(3, WIDTH))
        if draw.precision == "parameters":
            self.model.bfloat16()
        if draw.precision == "autocast within":
            self.model.forward = autocast(self.model.forward)
        self.called = self.model
        self.optimizers = self.make_optimizers()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if draw.loop == "scaler" else None
        self.teacher = Base(Clock(), draw)
        self.teacher.forward = lambda values: values

    def make_optimizers(self):
        draw, clock = self.draw, self.clock
        parameters = [*self.model.parameters()] or [self.bare]
        if draw.loop == "gan":
            self.critic = MODELS["floats"](clock, draw)
            make = slow(torch.optim.SGD, draw, clock, lr=0.01)
            return [make(parameters), make(self.critic.parameters())]
        if draw.loop == "foreign":
            return [Foreign(parameters, clock, draw)]
        if draw.loop == "lbfgs":
            return [slow(torch.optim.LBFGS, draw, clock, lr=0.1, max_iter=3)(parameters)]
        kind = self.chance.choice([torch.optim.SGD, torch.optim.AdamW])
        make = slow(kind, draw, clock, lr=0.01)
        if len(parameters) > 1 and self.chance.random() < 0.3:
            return [make(parameters[:1]), make(parameters[1:])]
        return [make(parameters)]

    # what the loop does

    def batch(self, index):
        """A batch; its sequences are as long as no batch is large."""
        chance = torch.Generator().manual_seed(1000 * self.draw.seed + index)
        if self.draw.model in ("floats", "energy", "bare"):
            dtype = torch.bfloat16 if self.draw.precision == "parameters" else torch.float32
            return torch.randn(3, WIDTH, generator=chance).to(dtype)
        varies = self.draw.model in ("named", "dictionary")
        length = int(torch.randint(5, 9, (), generator=chance)) if varies else 7
        shape = (length, 3) if self.draw.model in ("attention", "recurrent") else (3, length)
        ids = torch.randint(VOCABULARY, shape, generator=chance)
        if not varies:
            return ids
        mask = torch.ones(shape, dtype=torch.int64)
        mask[0, -2:] = 0
        return {"labels": torch.arange(3), "input_ids": ids, "attention_mask": mask}

    def call(self, model, batch):
        """Call the model as this loop does."""
        outer = self.draw.precision == "autocast"
        with torch.autocast("cpu", torch.bfloat16) if outer else contextlib.nullcontext():
            if self.draw.model == "named":
                return model(**batch)
            return model(self.bare * batch if self.draw.model == "bare" else batch)

    def forward(self, batch, model=None):
        """A forward pass of training, with its loss outside of the model."""
        ids = batch["input_ids"] if isinstance(batch, dict) else batch
        with self.clock.within(Phase.FORWARD):
            logits = self.call(self.called if model is None else model, batch)
        if not ids.is_floating_point():
            self.clock.train_on(ids.numel())
            is_first = self.draw.model in ("attention", "recurrent")
            self.lengths.add(ids.shape[0 if is_first else -1])
        self.clock.spend(self.draw.loss_ms)
        self.model.fail("loss")
        return logits.float().square().mean()

    def backward(self, loss):
        self.losses.append(float(loss.detach()))
        with self.clock.within(Phase.BACKWARD):
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def update(self):
        for optimizer in self.optimizers:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()
        self.drop_gradients()

    def drop_gradients(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def evaluate(self, batch, context=torch.no_grad):
        """A pass that is none of training: other."""
        self.model.eval()
        with context():
            self.call(self.called, batch)
        self.model.train()

    def closure(self, batch):
        """What an optimizer calls for a loss."""

        def closure():
            self.drop_gradients()
            with self.clock.within(Phase.OTHER):
                loss = self.forward(batch)
            self.backward(loss)
            return loss

        return closure

    def train(self, number, batches):
        """The inside of a step."""
        draw = self.draw
        if draw.loop in ("lbfgs", "closure"):
            for optimizer in self.optimizers:
                optimizer.step(self.closure(next(batches)))
            return
        if draw.loop == "gan":
            fake = self.forward(next(batches))
            self.backward(fake + self.forward(next(batches), self.critic))
        elif draw.loop == "grad":
            loss = self.forward(next(batches))
            weights = [*self.model.parameters()] or [self.bare]
            with self.clock.within(Phase.BACKWARD):
                gradients = torch.autograd.grad(loss, weights, allow_unused=True)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient
        else:
            for _ in range(draw.micro_batches):
                batch = next(batches)
                if draw.loop == "teacher":
                    with torch.no_grad():
                        self.teacher(batch)
                        self.clock.spend(draw.other_ms)
                self.backward(self.forward(batch))
        if draw.fault == "nan" and number == draw.fault_step:
            weight = next(self.model.parameters(), self.bare)
            if weight.grad is not None:
                weight.grad.fill_(float("nan"))
        self.clock.spend(draw.other_ms)
        if draw.loop != "every" or number % 2:
            self.update()

    def around(self, number, batch):
        """What the loop does besides training, inside of a step."""
        extras = self.draw.extras
        if "evaluation" in extras and number % 2:
            self.evaluate(batch)
        if "generation" in extras:
            for _ in range(2):
                self.evaluate(batch, torch.inference_mode)
        if "evaluation mode" in extras and number == 3:
            self.evaluate(batch, contextlib.nullcontext)
        if "save" in extras:
            self.save()
        if "average" in extras:
            copied = copy.deepcopy(self.model)
            assert copied.clock is not self.clock
            torch.optim.swa_utils.AveragedModel(self.model).update_parameters(self.model)
        if "thread" in extras:
            thread = threading.Thread(target=self.evaluate, args=(batch,))
            thread.start()
            thread.join()
        if "fork" in extras and number == 1 and (child := os.fork()) == 0:
            os._exit(0)
        elif "fork" in extras and number == 1:
            os.waitpid(child, 0)

    def save(self):
        """Save the model as a checkpoint does; loaded again, it holds nothing of ours."""
        if "forward" not in vars(self.model):
            torch.save(self.model, buffer := io.BytesIO())
            assert b"cs336.watched" not in buffer.getvalue()
            loaded = pickle.loads(pickle.dumps(self.model))
            with torch.no_grad():
                self.call(loaded, self.batch(0))
        pickle.dumps([getattr(optimizer, "state", None) for optimizer in self.optimizers])

    def inject(self, number):
        """Let the fault happen in this step."""
        draw = self.draw
        if draw.fault is None or number != draw.fault_step:
            return
        errors = {
            "forward": ZeroDivisionError("in forward"),
            "backward": RuntimeError("in backward"),
            "loss": ValueError("in the loss"),
            "keyboard": KeyboardInterrupt(),
            "memory": torch.OutOfMemoryError("CUDA out of memory"),
        }
        where = {"keyboard": "forward", "memory": self.memory_place}.get(draw.fault, draw.fault)
        if draw.fault in errors:
            self.model.fault = where, errors[draw.fault]
        if draw.fault == "hook":
            self.broken = self.model.register_forward_pre_hook(broken_hook)

    @property
    def memory_place(self):
        """Where memory does not suffice."""
        return ("forward", "backward", "loss")[self.draw.seed % 3]

    # how it is run

    def batches(self, watched):
        """Where batches come from: their loads are data only where they are seen."""
        loader = DataLoader(Batches(self), batch_size=None)
        self.loads_seen = self.draw.loader != "none"
        if self.draw.loader == "own iterator":
            return watched.data(Batches(self)[index] for index in range(100))
        if self.draw.loader == "none":
            return (Batches(self)[index] for index in range(100))
        return iter(loader)

    def report(self):
        """Print the table and take the hooks away in the middle of the loop, as a report does; what
        comes before the next step is not seen then. (The report's page takes seconds.)
        """
        # RuntimeError: there may be no step to report
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(RuntimeError):
            self.watched.remove()
            str(self.watched)
        self.clock.forget()

    def wrap(self):
        """Wrap the model before `watch`."""
        kind = self.draw.wrapper
        if kind in COMPILED:
            torch._dynamo.reset()  # loops share the code of models
        if kind == "before":
            self.called = torch.compile(self.model, backend="eager")
        if kind == "data parallel":
            self.called = nn.parallel.DistributedDataParallel(self.model)
        return self.called

    def wrap_later(self):
        """Wrap it after `watch`."""
        if self.draw.wrapper == "after":
            self.called = torch.compile(self.model, backend="eager")
        if self.draw.wrapper == "in place":
            self.model.compile(backend="eager")

    def run(self, is_watched):
        """Run the loop."""
        draw, called = self.draw, self.wrap()
        models = [called, self.critic] if draw.loop == "gan" else called
        self.watched, second = Unwatched(), Unwatched()
        if is_watched:
            self.watched = watch(
                models, self.optimizers, warmup_steps=WARMUP, output=self.output, name="drawn"
            )
            self.all_watched.append(self.watched)
        if "second loop" in draw.extras and is_watched:
            second = watch(nn.Linear(2, 2), warmup_steps=0, output=self.output)
            self.all_watched.append(second)
        self.wrap_later()
        if "hooks of theirs" in draw.extras:
            self.model.register_forward_hook(quiet_hook)
            self.model.register_full_backward_hook(quiet_hook)
        batches = self.batches(self.watched)
        for number in range(STEPS):
            if "skip" in draw.extras and number == 2:
                continue
            self.clock.spend(draw.other_ms)
            between = next(batches) if draw.loader == "between" else None
            self.inject(number)
            try:
                with self.watched.step(), self.clock.step():
                    with second.step():
                        self.around(number, self.batch(50))
                    self.train(number, iter([between] * 9) if between is not None else batches)
            except (Exception, KeyboardInterrupt) as error:
                self.errors.append((type(error), error.args))
                self.drop_gradients()
            self.model.fault = None  # the step may not have come to it
            if self.broken is not None:
                self.broken.remove()
            if "report" in draw.extras and number == 3:
                self.report()


def quiet_hook(*_):
    """A hook of theirs."""


def broken_hook(*_):
    raise LookupError("in a hook of theirs")


def autocast(forward):
    """The forward pass under autocast, as Accelerate wraps it."""

    def within(*inputs, **named):
        with torch.autocast("cpu", torch.bfloat16):
            return forward(*inputs, **named)

    return within


# what is compared


def false_statements(draw: Draw, output: Path) -> list[str]:
    """What is false of a watched loop: what it changed, and what is said of it that is not so."""
    before = patched()
    plain, loop = Loop(draw, output), Loop(draw, output)
    plain.run(is_watched=False)
    with mock.patch("cs336.watched.marks.perf_counter_ns", loop.clock.read):
        loop.run(is_watched=True)
        said = said_falsely(loop)
    for watched in loop.all_watched:
        watched.remove()
    false = [f"changed: {name}" for name in changed(plain, loop)]
    left = [name for name, now in patched().items() if now is not before[name]]
    for module in (*loop.called.modules(), *loop.model.modules()):
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        left += [f"a hook of {module}" for hook in hooks if "cs336" in type(hook).__module__]
        if "cs336" in type(module._compiled_call_impl).__module__:
            left.append("the call of a compiled model")
    for optimizer in loop.optimizers:
        hooks = getattr(optimizer, "_optimizer_step_pre_hooks", ())
        left += ["a hook of an optimizer"] * len(hooks)
    return false + [f"left behind: {what}" for what in left] + said


def patched():
    """The functions of PyTorch that are wrapped while a loop is watched."""
    wrapper = sys.modules.get("torch._dynamo.eval_frame")
    return {
        "autograd": torch.autograd._engine_run_backward,
        "next": torch.utils.data.dataloader._BaseDataLoaderIter.__next__,
        "iter": DataLoader.__iter__,
        "compiler": wrapper and wrapper.OptimizedModule.__call__,
    }


def changed(plain, loop):
    """What differs between the loop that was watched and the one that was not."""
    if repr(plain.losses) != repr(loop.losses):
        yield f"losses {plain.losses} {loop.losses}"
    if plain.errors != loop.errors:
        yield f"exceptions {plain.errors} {loop.errors}"
    ours, theirs = ([*made.model.parameters(), made.bare] for made in (loop, plain))
    for our, their in zip(ours, theirs, strict=True):
        if not torch.equal(our.isnan(), their.isnan()):
            yield "parameters that are NaN"
        elif not torch.equal(our.nan_to_num(), their.nan_to_num()):
            yield "parameters"


def said_falsely(loop):
    """What the record says that is not so."""
    if len(loop.clock.steps) <= WARMUP:
        return []
    record = loop.watched.record()
    steps, between = loop.clock.steps[WARMUP:], loop.clock.between[WARMUP:]
    times = {each.phase: each.times_s for each in record.measurements}
    false = []

    def compare(name, said_s, truth_s):
        if len(said_s) != len(truth_s) or any(map(differ, said_s, truth_s)):
            false.append(f"{name}: {said_s}, not {truth_s}")

    compare("step", times.pop(Phase.STEP), [sum(step.values()) for step in steps])
    between = [gap for gap in between if gap is not None]
    compare("between", record.between_s, [sum(gap.values()) for gap in between])
    loads = [gap.get(Phase.DATA, 0.0) for gap in between]
    compare("data between", record.seen.between_data_s, loads)
    if Phase.FORWARD not in times and (times.keys() - {Phase.DATA}):
        false.append(f"phases without forward: {times}")
    for phase, said_s in times.items():
        having = [step for step in steps if phase in step or phase is not Phase.OPTIMIZER]
        compare(phase, said_s, [step.get(phase, 0.0) for step in having])
    if Phase.FORWARD in times:
        for phase in {phase for step in steps for phase in step} - times.keys():
            false.append(f"{phase} is not seen")
    return false + facts_said_falsely(loop, record)


def facts_said_falsely(loop, record):
    """What is said of tokens, lengths and precision that is not so."""
    false = []
    if torch.OutOfMemoryError in [kind for kind, _ in loop.errors]:
        told = record.seen.out_of_memory
        doing = {"loss": "other"}.get(loop.memory_place, loop.memory_place)
        if told is None or told.doing != doing:
            false.append(f"out of memory in {doing}: {told}")
    tokens = loop.clock.tokens[WARMUP:]
    if record.seen.tokens and list(record.seen.tokens) != tokens:
        false.append(f"tokens {record.seen.tokens}, not {tokens}")
    lengths = record.seen.context_lengths
    if lengths is not None and not set(lengths) <= loop.lengths:
        false.append(f"lengths {lengths}, not {loop.lengths}")
    precision = PRECISIONS[loop.draw.precision]
    if record.loop.precision not in (None, precision):
        false.append(f"precision {record.loop.precision}, not {precision}")
    return false


def differ(said_s: float, truth_s: float) -> bool:
    """Whether times differ: the clock is that of the truth, so only by how floats are rounded."""
    return abs(said_s - truth_s) > 1e-6


def main(first: int, count: int) -> None:
    """Say what is false of so many loops."""
    with tempfile.TemporaryDirectory() as output, one_rank(Path(output)):
        for seed in range(first, first + count):
            begun = time.perf_counter()
            faulthandler.dump_traceback_later(20, exit=True)
            for what in false_statements(drawn(seed), Path(output)):
                print(drawn(seed), what[:300], sep="\n    ")
            if time.perf_counter() - begun > 1:
                print(seed, "took", time.perf_counter() - begun, drawn(seed).wrapper)


@contextlib.contextmanager
def one_rank(directory: Path):
    """A group of one process, for DistributedDataParallel, and one thread: loops are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory / 'group'}", rank=0, world_size=1
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
