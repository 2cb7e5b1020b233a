"""What is told of snapshots without notes. Oracles: the books of simulated programs, and notes
that are taken away.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from cs336.analysis.memory.explain import explain_memory
from cs336.analysis.memory.profile import MIN_LATER, Category, MemoryProfile
from cs336.analysis.memory.snapshot import Frame
from cs336.analysis.memory.stacks import callers_of
from cs336.report.sections.memory.findings import answer, findings
from tests.analysis.memory.programs import BEFORE, STACK, Program
from tests.analysis.memory.snapshots import MIB, snapshot_of, use_at_random, write

EXAMPLES = (
    Path(__file__).parents[3] / "data" / "published" / "memory_profiles" / "h200" / "examples"
)
PACKAGES = "/opt/env/lib/python3.12/site-packages"
MAIN = ("main", "/home/user/train.py")
WRAPPER = ("wrapper", f"{PACKAGES}/torch/optim/optimizer.py")
CLOSURE = [
    ("closure", "/home/user/train.py"),
    ("step", f"{PACKAGES}/torch/optim/lbfgs.py"),
    WRAPPER,
    MAIN,
]
OPTIMIZERS = {
    "own file": [
        ("_update", "/home/user/lm/optimizer.py"),
        ("step", "/home/user/lm/optimizer.py"),
        MAIN,
    ],
    "torch": [("_init_group", f"{PACKAGES}/torch/optim/adamw.py"), WRAPPER, MAIN],
    "class in the script": [
        ("newton_schulz", "/home/user/gpt.py"),
        ("step", "/home/user/gpt.py"),
        WRAPPER,
        MAIN,
    ],
    "qualified name": [("Muon.step", "/home/user/train.py"), MAIN],
    "apex": [("step", f"{PACKAGES}/apex/optimizers/fused.py"), MAIN],
    "DeepSpeed": [("step", f"{PACKAGES}/deepspeed/runtime/zero/stage3.py"), MAIN],
    "Windows": [("step", r"C:\lib\site-packages\torch\optim\sgd.py"), MAIN],
}
OTHERS = {
    "a training step": [("train_step", "/home/user/train.py"), MAIN],
    "forward in a closure": [("forward", "/home/user/model.py"), *CLOSURE],
    "a closure": CLOSURE,
    "zero_grad": [("zero_grad", f"{PACKAGES}/torch/optim/optimizer.py"), MAIN],
    "an average of weights": [("update_parameters", f"{PACKAGES}/torch/optim/swa_utils.py"), MAIN],
    "a file with a like name": [("step", "/home/user/million.py"), MAIN],
    "nothing": [],
}


@pytest.mark.parametrize("name", [*OPTIMIZERS, *OTHERS])
def test_an_optimizer_is_known_by_its_file_or_class(name: str) -> None:
    stack = tuple(Frame(file, 1, function) for function, file in (OPTIMIZERS | OTHERS)[name])
    makers = callers_of([stack])
    assert makers.is_optimizer.tolist() == [name in OPTIMIZERS]
    assert makers.is_autograd.tolist() == [name == "nothing"]
    assert makers.is_zero_grad.tolist() == [name == "zero_grad"]


NAMES = ("adamw", "sgd", "muon", "lion", "soap", "shampoo", "adafactor", "optimizer", "lamb")
PROGRAMS = ("train_{}", "{}_baseline", "pretrain_gpt_{}", "run_{}", "{}_experiment", "finetune_{}")
AROUND = ("train_step", "step", "init_model", "evaluate_step", "state_of_batch", "update_model")
WITHIN = ("step", "_init_group", "update_fn", "init_state", "_update")
LIBRARIES = ("{}", "fused_{}", "my_{}", "distributed_{}")


@pytest.mark.parametrize("seed", range(40))
def test_a_program_that_is_named_after_its_optimizer_is_none(seed: int) -> None:
    """Each stack is drawn twice: with the optimizer's own function innermost, and without it."""
    draw = random.Random(seed)
    optimizer = draw.choice(NAMES)
    program = f"/home/{optimizer}/{draw.choice(PROGRAMS).format(optimizer)}.py"
    owner = draw.choice(["", "Trainer.", f"{optimizer.capitalize()}Trainer.", "Stage.", "Model."])
    around = (Frame(program, 1, f"{owner}{draw.choice(AROUND)}"), Frame(program, 2, "main"))
    library = f"/home/{optimizer}/lm/{draw.choice(LIBRARIES).format(optimizer)}.py"
    in_class = Frame(program, 3, f"{optimizer.capitalize()}.{draw.choice(WITHIN)}")
    in_file = Frame(library, 3, draw.choice(WITHIN))
    helper = Frame(program, 4, "newton_schulz")
    stacks = [around, (in_class, *around), (in_file, *around), (helper, in_class, *around)]
    assert callers_of(stacks).is_optimizer.tolist() == [False, True, True, True]


def frames(calls: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"name": function, "filename": file, "line": 7} for function, file in calls]


class Loop(Program):
    """A training loop without notes; PyTorch records no frames in backward, and frees with
    frames or without.
    """

    def __init__(
        self, optimizer: list[tuple[str, str]], are_replaced: bool, have_frees_frames: bool
    ) -> None:
        super().__init__()
        self.step_frames, self.are_replaced = frames(optimizer), are_replaced
        self.free_frames = self.step_frames if have_frees_frames else []
        self.rng = random.Random(1)
        self.sizes = [self.rng.randrange(MIB, 3 * MIB) for _ in range(6)]
        for size in self.sizes:
            self.malloc(size, label="held throughout")
        self.state: list[int | None] = []

    def train(self, step: int) -> None:
        self.mark(step, "start")
        saved = [self.malloc(self.rng.randrange(MIB), frames=STACK) for _ in range(20)]
        self.mark(step, "forward")
        gradients = [self.malloc(size, label="gradients") for size in self.sizes]
        for address in saved:
            self.free(address)
        self.mark(step, "backward")
        made = []
        for index, size in enumerate(self.sizes):
            passing = self.malloc(size, frames=self.step_frames)
            if self.are_replaced or not self.state:
                made.append(self.malloc(size, frames=self.step_frames, label="optimizer state"))
            self.free(passing, self.free_frames)
            if self.are_replaced and self.state:
                self.free(self.state[index], self.free_frames)
        self.state = made or self.state
        self.mark(step, "optimizer")
        for address in gradients:
            self.free(address, frames(OTHERS["zero_grad"]) if self.free_frames else [])


@pytest.mark.parametrize("optimizer", ["own file", "torch", "class in the script"])
@pytest.mark.parametrize("are_replaced", [False, True], ids=["in place", "replaced"])
@pytest.mark.parametrize("have_frees_frames", [False, True])
@pytest.mark.parametrize("begun", [0, 2])
def test_state_and_gradients_are_those_of_the_books(
    tmp_path: Path, optimizer: str, are_replaced: bool, have_frees_frames: bool, begun: int
) -> None:
    """At every mark, whether recording begins with the first step or after two."""
    loop = Loop(OPTIMIZERS[optimizer], are_replaced, have_frees_frames)
    loop.record()
    for step in range(5):
        if step == begun:
            loop.record()
            for name in ("marks", "moments", "books"):
                getattr(loop, name).clear()
        loop.train(step)
    line = explain_memory(write(tmp_path / "alone.pickle", snapshot_of(loop))).timeline
    assert len(line.time_s) == len(loop.truth)
    for moment, books in zip(loop.moments, loop.books, strict=True):
        found = {
            str(name): values[moment]
            for name, values in zip(line.categories, line.num_bytes, strict=True)
        }
        for name in ("gradients", "optimizer state", "held throughout"):
            assert found.get(name, 0) == books[name], (moment, name)


@pytest.mark.parametrize(
    ("name", "is_trained"),
    [
        ("2.7B_ctx512_b4_train_fp32_41fe812f1b_r0", True),
        ("xl_ctx512_b4_inference_fp32_55ff2dcde6_r0", False),
    ],
)
def test_what_is_told_without_notes_is_what_the_notes_tell(
    name: str, is_trained: bool, tmp_path: Path
) -> None:
    """On an H200: state and gradients to the byte, and what is held until later to 2 % of what
    autograd saves.
    """
    known = EXAMPLES / f"{name}.pickle"
    (tmp_path / known.name).write_bytes(known.read_bytes())
    told, found = (
        {str(row.category): row.num_bytes for row in explain_memory(path).peak.categories}
        for path in (known, tmp_path / known.name)
    )
    for category in ("gradients", "optimizer state"):
        assert found.get(category) == told.get(category)
        assert (category in told) is is_trained
    saved = told.get("saved activations", 0)
    assert found.get("held until later", 0) == pytest.approx(
        saved, rel=0.02, abs=1e-3 * sum(told.values())
    )


@pytest.mark.parametrize(
    ("others", "end", "category"),
    [
        (MIN_LATER - 1, "freed", Category.TEMPORARY),
        (MIN_LATER, "freed", Category.LATER),
        (MIN_LATER, "kept", Category.KEPT),
        (1, "kept", Category.KEPT),
        (1, "freed early", Category.EARLIER),
    ],
)
def test_the_lifetime_tells_the_category(
    others: int, end: str, category: Category, tmp_path: Path
) -> None:
    """With notes, whatever has no sighting is temporary, however long it stays."""
    program = Program()
    kept = program.malloc(8 * MIB, frames=STACK) if end == "freed early" else None
    program.record()
    kept = kept or program.malloc(8 * MIB, frames=STACK)
    for _ in range(others):
        program.free(program.malloc(MIB, frames=STACK))
    if end != "kept":
        program.free(kept)
    explained = explain_memory(write(tmp_path / "alone.pickle", snapshot_of(program)))
    assert {row.requested_bytes: row.category for row in explained.largest} == {
        8 * MIB: category,
        MIB: Category.TEMPORARY,
    }
    program.mark(0, "start")
    assert {row.category for row in explain_memory(program.write(tmp_path)).largest} == {
        Category.TEMPORARY
    }


def explain_with_pools(
    program: Program, private: set[int], folder: Path, **settings: Any
) -> MemoryProfile:
    """`private` are the addresses of the segments of private pools."""
    content = snapshot_of(program)
    content["allocator_settings"] |= settings
    for segment in content["segments"]:
        segment["segment_pool_id"] = (
            (0, 1 + segment["address"] % 3) if segment["address"] in private else (0, 0)
        )
    return explain_memory(write(folder / "pools.pickle", content))


@pytest.mark.parametrize("seed", range(4))
def test_private_pools_against_brute_force(seed: int, tmp_path: Path) -> None:
    """If the recording begins in the middle (odd seeds), sizes of blocks from before are known
    to 1 MiB only.
    """
    program, rng = Program(), random.Random(seed)
    use_at_random(program, rng, 100 * (seed % 2))
    program.record()
    use_at_random(program, rng, 300)
    private = {segment.address: segment.size for segment in program.segments if rng.random() < 0.5}
    profile = explain_with_pools(program, set(private), tmp_path)
    peak = round(profile.peak.time_s * 1e6 / 3) + 1  # there are 3 us from event to event
    born = {
        e["addr"]: i for i, e in enumerate(program.events or []) if e["action"] == "segment_alloc"
    }
    there = {address: size for address, size in private.items() if born.get(address, BEFORE) < peak}
    used = sum(
        size
        for address, size, _ in program.truth[peak].in_use
        if any(begin <= address < begin + whole for begin, whole in there.items())
    )
    assert profile.private_bytes == sum(there.values())
    assert profile.idle_private_bytes == pytest.approx(
        sum(there.values()) - used, abs=8 * MIB * (seed % 2)
    )
    assert (
        profile.fragmentation_bytes + profile.idle_private_bytes
        == profile.peak.reserved_bytes - profile.peak.allocated_bytes
        >= 0
    )


@pytest.mark.parametrize(
    ("is_private", "is_expandable"), [(True, False), (False, False), (False, True)]
)
def test_memory_of_graphs_is_no_fragmentation(
    is_private: bool, is_expandable: bool, tmp_path: Path
) -> None:
    """A graph was captured: 600 MiB of its pool are in no block. Beside it 700 MiB are in use."""
    program = Program()
    program.record()
    captured = program.malloc(600 * MIB, frames=STACK)
    program.free(captured)
    (segment,) = program.segments
    program.malloc(700 * MIB, frames=STACK)
    profile = explain_with_pools(
        program,
        {segment.address} if is_private else set(),
        tmp_path,
        expandable_segments=is_expandable,
    )
    expected = (600 * MIB, 600 * MIB, 0) if is_private else (0, 0, 600 * MIB)
    assert (
        profile.private_bytes,
        profile.idle_private_bytes,
        profile.fragmentation_bytes,
    ) == expected
    assert any("private pools" in finding.text for finding in answer(profile)) is is_private
    assert any("expandable_segments" in finding.text for finding in findings(profile)) is not (
        is_private or is_expandable
    )


def test_what_segments_do_not_explain_is_no_negative_fragmentation(tmp_path: Path) -> None:
    program = Program()
    program.record()
    program.malloc(30 * MIB)
    content = snapshot_of(program)
    content["segments"].clear()
    profile = explain_memory(write(tmp_path / "lost.pickle", content))
    assert (profile.peak.reserved_bytes, profile.fragmentation_bytes) == (30 * MIB, 0)
    assert any("Segments are missing" in note for note in profile.notes)
