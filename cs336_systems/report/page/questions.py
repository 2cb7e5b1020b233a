"""The course's questions (CS336, assignment 2: systems) in its order, each with its answer from all results of a page.

`PROBLEMS` lists what the course asks, and for each part the command that measures what answers it and the function that
answers. Nothing here names a results directory: of several, `answers/answer.py` chooses by rule.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from cs336_systems.report.page.answers import attention, checkpoints, kernels, memory, paper, parallel, precision, steps
from cs336_systems.report.page.answers.answer import Answer, Material
from cs336_systems.report.page.collection import Collection, block_id
from cs336_systems.report.page.write import Block, Chapter, Linked, Prose, TableBlock
from cs336_systems.text import counted, inert_line

TIMES = "python benchmark_sweep.py --context-lengths 512"
WARMUP = "python benchmark_sweep.py --sizes small xl --context-lengths 512 --warmup-steps 0 1 2 5"
NSYS = "python benchmark_sweep.py --nsys --sizes small xl --context-lengths 256 512 1024"
PRECISION = "python precision.py --output data/precision"
MEMORY = (
    "python benchmark_sweep.py --memory --sizes 2.7B --context-lengths 128 2048 --modes inference train "
    "--warmup-steps 1 --measured-steps 2"
)
CHECKPOINTS = "python benchmark_sweep.py --sizes xl 2.7B --context-lengths 2048 --checkpoint-blocks 1 2 3 4 6 8"
OWN = (
    "cs336 attention --own flash:FlashAttention --batch-size 1 --causal --precisions bf16 fp32 --d-heads 16 32 64 128 "
    "--context-lengths 128 256 512 1024 2048 4096 8192 16384 32768 65536"
)
TWO_RANKS = "python benchmark_sweep.py --sizes xl --context-lengths 512 --ranks 2"
SHARDED = (
    'cs336 compare "--size xl --parallel ddp-overlap --ranks 2" '
    '"--size xl --parallel ddp-overlap --ranks 2 --shard-optimizer" --name sharded_optimizer'
)
LEADERBOARD = (
    "python benchmark_sweep.py --sizes 8B --context-lengths 32768 --batch-size 1 --fast --ranks 2 "
    "--parallel ddp-overlap --shard-optimizer"
)
REDUCE = "cs336 ceilings --world-size 4 --name four-processes"
INTRODUCTION = (
    "What the course asks in assignment 2, in its order, answered from the results of this page; a draft of what is "
    "handed in. The sizes are those of the table of the 2025 edition. The 2026 edition calls 2.7B xl; xl is here that "
    "of 2025. Batch 4 and context 512 unless said otherwise."
)
MEASURED_BY = "Measured by"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a problem."""

    id: str
    asked: str
    """The question in a few words."""
    command: str
    """Command line that measures the results for the answer."""
    answer: Callable[[Material], Answer | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem of the assignment."""

    title: str
    settings: str
    """What the course measures."""
    parts: tuple[Part, ...]


PROBLEMS = (
    Problem(
        title="Benchmarking script",
        settings="all sizes, 5 warm-up steps, 10 measured steps",
        parts=(
            Part("benchmarking-a", "Time forward, forward and backward, and whole steps.", TIMES, steps.script),
            Part("benchmarking-b", "How long are forward, backward and the optimizer of each size, and do they vary?",
                 TIMES, steps.times),
            Part("benchmarking-c", "What changes without warm-up, or with 1 or 2 steps of it, and why?",
                 WARMUP, steps.warmup),
        ),
    ),
    Problem(
        title="Nsight Systems",
        settings="two sizes, three contexts above 128, the largest that fits",
        parts=(
            Part("nsys-a", "How long is forward, and does that match the clock?", NSYS, kernels.forward_time),
            Part("nsys-b", "Which kernel takes most of forward, how often, and is it the same with backward?",
                 NSYS, kernels.top_kernel),
            Part("nsys-c", "Which other kernels matter in forward?", NSYS, kernels.other_kernels),
            Part("nsys-d", "How does the share of matrix products change from forward alone to a whole step?",
                 f"{NSYS} --modes inference train", kernels.product_share),
            Part("nsys-e", "How does softmax compare with the matrix products of attention, in time and in FLOPs?",
                 NSYS, kernels.softmax),
        ),
    ),
    Problem(
        title="Accumulation in mixed precision",
        settings="0.01 added a thousand times",
        parts=(
            Part("accumulation", "What do sums in fp32, fp16, fp32 of fp16, and fp32 of cast fp16 give?", PRECISION,
                 precision.accumulation),
        ),
    ),
    Problem(
        title="Mixed precision",
        settings="a toy model under fp16 autocast; all sizes with bf16",
        parts=(
            Part("mixed-precision-a", "Which data types have parameters, layers, logits, loss and gradients?",
                 PRECISION, precision.data_types),
            Part("mixed-precision-b", "What of layer norm is sensitive to precision, and is it with bf16?", PRECISION,
                 precision.layer_norm),
            Part("mixed-precision-c", "How do times change with bf16, and what is the trend over sizes?",
                 f"{TIMES} --precisions fp32 bf16", steps.mixed_precision),
        ),
    ),
    Problem(
        title="Memory",
        settings="2.7B (2026: xl) at contexts 128 and 2048; in 2025 at 128, 256 and 512",
        parts=(
            Part("memory-a", "How does memory run over forward alone and a whole step, and can the stages be told?",
                 MEMORY, memory.timelines),
            Part("memory-b", "What are the peaks of forward alone and of a whole step?", MEMORY, memory.peaks),
            Part("memory-c", "What are they in mixed precision?", f"{MEMORY} --precisions fp32 bf16",
                 memory.mixed_peaks),
            Part("memory-d", "How large is one activation of the residual stream in fp32?", MEMORY,
                 memory.residual_stream),
            Part("memory-e", "How large are the largest allocations, and where do they come from?", MEMORY,
                 memory.largest),
            Part("memory-f", "What does one block save for backward, where, and which gradients does it make?",
                 MEMORY, memory.block),
        ),
    ),
    Problem(
        title="Activation checkpointing",
        settings="2.7B (2026: xl) at context 2048",
        parts=(
            Part("checkpointing-a", "Which strategy needs the least memory, and how does that grow with N blocks?",
                 MEMORY, checkpoints.strategy),
            Part("checkpointing-b", "Which group of blocks is best for one level of checkpoints?", CHECKPOINTS,
                 checkpoints.groups),
        ),
    ),
    Problem(
        title="Attention in PyTorch",
        settings="batch 8, no heads, d_head 16 to 128, context 256 to 16,384, 100 passes",
        parts=(
            Part("attention", "How long are forward and backward, what is held between them, where does it run out?",
                 "cs336 attention", attention.attention),
        ),
    ),
    Problem(
        title="Compilation",
        settings="the same attention; the whole model",
        parts=(
            Part("compile-a", "How does compiled attention compare with eager?", "cs336 attention",
                 attention.compiled_attention),
            Part("compile-b", "How does the compiled model compare with eager: forward, backward, step?",
                 f"{TIMES} --compile none default", steps.compiled_model),
        ),
    ),
    Problem(
        title="Flash attention",
        settings="batch 1, causal, context 128 to 65,536, d_head 16 to 128, bf16 and fp32",
        parts=(
            Part("flash-attention", "How does the own kernel compare with PyTorch: forward, backward, both?", OWN,
                 attention.own_kernel),
        ),
    ),
    Problem(
        title="Communication",
        settings="all-reduce of 1 MB to 1 GB over 2, 4 and 6 processes; by NCCL on GPUs, with --device cpu by gloo",
        parts=(
            Part("communication", "How long does an all-reduce take?", REDUCE, parallel.all_reduce),
        ),
    ),
    Problem(
        title="Data parallel training",
        settings="xl, 2 GPUs",
        parts=(
            Part("ddp", "Naive, flat, overlapped: time of a step, and share of communication?",
                 f"{TWO_RANKS} --parallel ddp-naive ddp-flat ddp-overlap ddp", parallel.averaged_gradients),
        ),
    ),
    Problem(
        title="Sharded optimizer",
        settings="xl, 2 GPUs",
        parts=(
            Part("optimizer-sharding", "Memory and time with and without; against ZeRO stage 1?",
                 SHARDED, parallel.sharded_optimizer),
        ),
    ),
    Problem(
        title="Fully sharded data parallel training",
        settings="xl, 2 GPUs",
        parts=(
            Part("fsdp", "How much memory does it save, and do the gathers end in time?",
                 f"{TWO_RANKS} --parallel ddp fsdp fsdp2", parallel.sharded_parameters),
        ),
    ),
    Problem(
        title="Parallelism on paper",
        settings="closed forms",
        parts=(
            Part("parallelism", "From which N on does communication limit each kind of parallel training?",
                 f"{paper.PARALLELISM} --device-name H200", paper.parallelism),
        ),
    ),
    Problem(
        title="Leaderboard",
        settings="8B, 2 GPUs, 2 x 32,768 tokens, bf16",
        parts=(Part("leaderboard", "How long does one training step take?", LEADERBOARD, parallel.leaderboard),),
    ),
)  # fmt: skip
"""In the order of the course."""


def questions_chapter(collection: Collection) -> Chapter:
    """The questions with their answers, a chapter for each problem; what is not measured says what to run."""
    material = Material.of(collection)
    found = {part.id: part.answer(material) for problem in PROBLEMS for part in problem.parts}
    whole = sum(answer is not None and not answer.lacking for answer in found.values())
    summary = (
        f"{whole} of {counted(len(found), 'part')} are answered in full; {len(found) - whole} say what to run for what "
        "is missing."
    )
    said = [INTRODUCTION, *_on_which_gpu(material), summary]
    chapters = [
        Chapter(
            id=f"questions-{number}",
            title=problem.title,
            source=f"Asked for: {problem.settings}.",
            blocks=list(_blocks(problem, found)),
        )
        for number, problem in enumerate(PROBLEMS, 1)
    ]
    return Chapter(
        id="questions",
        title="The course's questions",
        blocks=[Prose(paragraphs=[(text, "") for text in said])],
        chapters=chapters,
    )


def _on_which_gpu(material: Material) -> Iterator[str]:
    """A sentence on the GPU of the answers, if steps were measured on several."""
    if len(material.gpus) > 1:
        usual, *others = material.gpus
        yield inert_line(
            f"Steps were measured on {' and '.join(material.gpus)}. Each answer is about one of these GPUs, and names "
            f"it: {usual}, which has the most runs, unless more of what is asked was measured on {' or '.join(others)}."
        )


def _blocks(problem: Problem, found: Mapping[str, Answer | None]) -> Iterator[Block]:
    """Each question, its answer, and what the answer rests on or what to run."""
    shown: dict[tuple[str, str], str] = {}
    for part in problem.parts:
        answer = found[part.id]
        letter = part.id[-1] if len(problem.parts) > 1 else ""
        sentences = [(inert_line(text), "") for text in answer.sentences] if answer else []
        yield Prose(heading=f"{letter}: {part.asked}" if letter else part.asked, paragraphs=sentences)
        for number, table in enumerate(answer.tables if answer else ()):
            yield TableBlock(id=f"questions-{part.id}-{number}", table=table)
        sources: list[tuple[str, str] | Linked] = []
        if answer and answer.places:
            sources.append(Linked(tuple(_sources(answer))))
        commands = list(_commands(part, answer))
        sources += [(f"{said[0]} {_again(said[0], shown[said])}.", "") for said in commands if said in shown]
        new = [(f"{words}:", inert_line(command)) for words, command in commands if (words, command) not in shown]
        if sources or new:
            yield Prose(paragraphs=sources, commands=new)
        shown |= {said: shown.get(said, letter) for said in commands if answer is not None}


def _again(words: str, letter: str) -> str:
    """A reference to a command of an earlier part, which may have one that measured it and one to run."""
    return f"the same command as in {letter}" if words == MEASURED_BY else f"the command that {letter} has for that"


def _commands(part: Part, found: Answer | None) -> Iterator[tuple[str, str]]:
    """What measured the answer, and what measures what is lacking."""
    for command in dict.fromkeys(found.commands if found else ()):
        yield MEASURED_BY, command
    if found is None:
        yield "Not measured yet; run", part.command
    elif found.lacking:
        yield f"The course also asks for {found.lacking}, not among these results; run", part.command


def _sources(found: Answer) -> Iterator[tuple[str, str]]:
    """The conditions, and the tables that the answer rests on."""
    yield (inert_line(f"{found.conditions}. ") if found.conditions else ""), ""
    yield "From the table ", ""
    for number, (directory, name) in enumerate(found.places):
        yield (" and " if number else ""), ""
        yield inert_line(f"{name} of {directory.as_posix()}"), block_id(directory, name)
    yield ".", ""
    for number, (words, (directory, name)) in enumerate(found.pictures):
        yield (", " if number else " Pictures: "), ""
        yield words, block_id(directory, name)
    yield ("." if found.pictures else ""), ""
