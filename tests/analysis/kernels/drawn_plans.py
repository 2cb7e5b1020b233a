"""What a drawn program does, how it names its ranges, and what its file lacks."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

MAIN, AUTOGRAD, LOADING = 1, 2, 3
COMPUTE, COMMUNICATION, COPIES, SIDE = 7, 20, 13, 17
MICROSECOND, MILLISECOND = 1_000, 1_000_000


class Part(StrEnum):
    """A part of a program, whether a range of the file names it or not."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    WEIGHTS = "weight gradients"
    OPTIMIZER = "optimizer"
    ZERO_GRAD = "zero_grad"
    CLIP = "clip"
    EVALUATION = "evaluation"
    DATA = "data"
    STEP = "step"
    PREFILL = "prefill"
    DECODE = "decode"
    CLOSURE = "closure"
    """A call of the optimizer inside of which forward and backward run."""


class Pause(StrEnum):
    """What keeps the host from launching."""

    NOTHING_SEEN = "pause"
    RANGE = "range"
    COLLECTOR = "gc"
    ALLOCATION = "malloc"
    COMPILING = "compile"
    WAITING = "wait"
    DATA = "data"
    PREPARING = "prepare"


HIDDEN = (Pause.NOTHING_SEEN, Pause.RANGE, Pause.COLLECTOR, Pause.ALLOCATION, Pause.COMPILING)
DECOYS = (
    "lr_scheduler.step",
    "log forward pass",
    "save optimizer state",
    "backward compatibility",
    "data parallel group",
)
KINDS = ("training", "inference", "server", "pipeline")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a drawn program does, how its ranges are named, and what its file lacks."""

    seed: int
    kind: str
    """`training`, `inference`, `server` or `pipeline`."""
    style: str
    """Whose names the ranges have: a key of STYLES."""
    limit: str
    """What takes longest: `gpu`, `host`, `data`, `copies` or `ranks`."""
    is_nsys: bool = False
    steps: int = 4
    micro_batches: int = 1
    layers: int = 2
    loader: str = ""
    """PyTorch's loader, whose range its profiler records, or the range of one's own, or none."""
    zero_grad: str = ""
    """`first`, `last` or nowhere."""
    optimizer: str = "torch"
    """`torch` has its range, `kernels` only names of kernels, `plain` neither, or none."""
    steps_of_micro: bool = False
    """The profiler's step is called after each micro-batch."""
    clips: bool = False
    evaluates: bool = False
    checkpoints: bool = False
    compiled: bool = False
    graph: str = ""
    """What is launched as CUDA graphs: `step`, `parts` or nothing."""
    side_stream: bool = False
    reads_loss: bool = True
    queue: int = 1024
    """Launches that wait for the device before the next one makes the host wait."""
    ranks: int = 1
    is_sharded: bool = False
    """Ranks gather parameters and scatter gradients, and reduce none."""
    slow_rank: int = 0
    devices: int = 1
    modules: bool = False
    hides: Pause | None = None
    """What keeps the host from launching for milliseconds in each step."""
    around: str = ""
    """A range around the whole program."""
    decoy: str = ""
    """A range after each step whose name has a word of a phase, and which is none."""
    prefetches: bool = False
    """Another thread copies the batch and prepares it on the device."""
    reads_in_forward: bool = False
    is_mixed: bool = False
    """A server's prefill has some decoding in it."""
    cut: tuple[float, float] = (0.0, 1.0)
    """The part of the run, by time, that the profiler records."""
    dropped: str = ""
    """What is lost of the file at random: `launches`, `operators`, `ranges`, `kernels`."""
    shift_ns: int = 0
    """How far the device's clock is off."""


LOADER = "enumerate(DataLoader)#{}DataLoaderIter.__next__"
_PL = "[pl][profile]"
STYLES: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "torch": {Part.STEP: "ProfilerStep#{n}"},
    "ours": {
        Part.STEP: "step",
        Part.DATA: "data",
        Part.FORWARD: "forward",
        Part.LOSS: "loss",
        Part.BACKWARD: "backward",
        Part.OPTIMIZER: "optimizer",
    },
    "phases": {Part.FORWARD: "forward", Part.BACKWARD: "backward", Part.OPTIMIZER: "optimizer"},
    "hashes": {
        Part.STEP: "ProfilerStep#{n}",
        Part.FORWARD: "## forward ##",
        Part.BACKWARD: "## backward ##",
        Part.OPTIMIZER: "## optimizer ##",
    },
    "lightning": {
        Part.STEP: f"{_PL}run_training_batch",
        Part.DATA: f"{_PL}[_TrainingEpochLoop].train_dataloader_next",
        Part.FORWARD: f"{_PL}[Strategy]SingleDeviceStrategy.training_step",
        Part.BACKWARD: f"{_PL}[Strategy]SingleDeviceStrategy.backward",
        Part.ZERO_GRAD: f"{_PL}[LightningModule]GPT.optimizer_zero_grad",
        Part.CLOSURE: f"{_PL}[LightningModule]GPT.optimizer_step",
    },
    "deepspeed": {
        Part.FORWARD: "DeepSpeedEngine.forward",
        Part.BACKWARD: "DeepSpeedEngine.backward",
        Part.OPTIMIZER: "DeepSpeedEngine.step",
    },
    "iteration": {
        Part.STEP: "iteration{n}",
        Part.FORWARD: "forward",
        Part.BACKWARD: "backward",
        Part.OPTIMIZER: "opt.step()",
    },
    "short": {
        Part.STEP: "iter {n}",
        Part.FORWARD: "fwd",
        Part.BACKWARD: "bwd",
        Part.OPTIMIZER: "opt",
    },
    "words": {
        Part.STEP: "train_step",
        Part.FORWARD: "model(x)",
        Part.BACKWARD: "loss.backward()",
        Part.OPTIMIZER: "optimizer.step()",
    },
    "vllm": {
        Part.PREFILL: "execute_context_{batch}({tokens})_generation_{decoding}({decoding})",
        Part.DECODE: "execute_context_0(0)_generation_{batch}({batch})",
    },
    "sglang": {
        Part.PREFILL: "step[EXTEND bs={batch} toks={tokens}]",
        Part.DECODE: "step[DECODE bs={batch}]",
    },
    "deepseek": {"attention": "attn({pass})", "mlp": "mlp({pass})"},
}
"""The name of the range around each kind of region that a program of this kind has."""


def draw(seed: int) -> Plan:
    """The plan of this seed."""
    random_ = random.Random(seed)
    pick, chance = random_.choice, random_.random
    kind = random_.choices(KINDS, [6, 1, 2, 1])[0]
    plan = Plan(
        seed=seed,
        kind=kind,
        style=pick(
            {"server": ("vllm", "sglang", "none"), "pipeline": ("deepseek", "none")}.get(
                kind, ("none", "torch", "ours")
            )
        ),
        limit=pick(("gpu", "gpu", "host", "data", "copies")),
        is_nsys=chance() < 0.25,
        steps=random_.randint(2, 5),
        layers=random_.randint(2, 4),
        loader=pick(("", "_SingleProcess", "_MultiProcessing")),
        reads_loss=chance() < 0.7,
        graph=pick(("", "", "step")),
        modules=chance() < 0.4,
        compiled=chance() < 0.3,
        cut=pick(((0.0, 1.0), (0.0, 1.0), (0.0, 0.8), (0.25, 1.0), (0.3, 0.7))),
        dropped=pick(("", "", "", "launches", "operators", "ranges", "kernels")),
        shift_ns=pick((0, 0, 0, 0, -400_000, 3_000_000)),
    )
    if kind == "training":
        plan = _trained(plan, random_)
    # picked last, so that the same seed draws the same program as before
    if chance() < 0.15:
        plan = replace(plan, loader="get_batch")
    plan = replace(plan, is_sharded=chance() < 0.4, queue=pick((1024, 1024, 24)))
    if plan.kind == "training" and plan.style in ("none", "torch", "iteration"):
        plan = replace(plan, style=pick((plan.style, plan.style, "short", "words")))
    if plan.ranks > 1 and chance() < 0.6:
        plan = replace(plan, cut=(0.0, 1.0), dropped="")
    return replace(
        plan,
        around=pick(("", "", "", "", "epoch 0", "training")),
        decoy=pick((*[""] * 6, *DECOYS)),
        prefetches=chance() < 0.15 and plan.kind == "training",
        reads_in_forward=chance() < 0.15 and not plan.graph,
        is_mixed=chance() < 0.3,
    )


def _trained(plan: Plan, random_: random.Random) -> Plan:
    """The plan with what only training has."""
    pick, chance = random_.choice, random_.random
    others = ("vllm", "sglang", "deepseek", "short", "words")
    styles = [style for style in STYLES if style not in others]
    style = pick(styles)
    micro_batches = 1 if style == "lightning" else pick((1, 1, 2, 4))
    ranks = pick((1, 1, 1, 1, 4)) if style != "lightning" and not plan.is_nsys else 1
    return replace(
        plan,
        style=style,
        micro_batches=micro_batches,
        steps_of_micro=micro_batches > 1 and style in ("torch", "hashes") and chance() < 0.3,
        zero_grad=pick(("", "first", "last")),
        optimizer="torch"
        if style == "lightning"
        else pick(("torch", "torch", "kernels", "plain", "")),
        clips=chance() < 0.3,
        evaluates=chance() < 0.2,
        checkpoints=chance() < 0.2,
        graph=""
        if style == "lightning" or ranks > 1 or micro_batches > 1
        else pick(("", "", "", "step", "parts")),
        side_stream=chance() < 0.2,
        ranks=ranks,
        slow_rank=random_.randrange(ranks),
        limit="ranks" if ranks > 1 and chance() < 0.5 else plan.limit,
        devices=1 if ranks > 1 else pick((1, 1, 1, 2)),
        hides=pick((None, None, *HIDDEN)),
    )
