"""Triton's kernels without a GPU, by its interpreter, and whole models compiled: each in a
process of its own.
"""

import json
import math
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch

from tests.model.fast.steps import MODEL
from tests.model.fast.test_weights import assert_rounded_at_random

COMMON = """
import functools, json, torch, triton.language as tl
from triton.language import core
from triton.runtime import interpreter

# once what each launch and each function of a kernel would do again: make `tl` and `core` what
# interprets
interpreter._patch_lang(lambda: (tl, core))
interpreter._patch_lang = lambda _: interpreter._LangPatchScope()
core.pointer_type.__hash__ = (
    core.dtype.__hash__
)  # and once for each type what makes a table of all types
interpreter._get_np_dtype = lambda kind, of=functools.cache(interpreter._get_np_dtype): of(
    kind.scalar
)

torch.manual_seed(0)
torch.cuda.is_current_stream_capturing = lambda: False  # which PyTorch for CPUs does not know
settings, found = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}, {}


def compare(name, here, expected):
    assert here.shape == expected.shape, name
    if here.numel():
        found.setdefault(name, []).append(
            ((here - expected).abs().max() / expected.abs().max().clamp(min=1)).item()
        )


def same(operator, kernel, *given, has_maxima=False):
    # with maxima, the largest of the last result is compared
    here, there = (
        [each] if isinstance(each, torch.Tensor) else [*each]
        for each in (kernel(*given), operator(*given))
    )
    if has_maxima:
        assert here[-1].shape == there[-1].shape
        here[-1], there[-1] = (
            each[-1].max() if each[-1].numel() else each[-1] for each in (here, there)
        )
    for number, (one, other) in enumerate(zip(here, there, strict=True)):
        compare(f"{kernel.__name__} {number}", one, other)
    return there
"""

ADAMW = """
from cs336.model.fast.adamw_kernel import CHUNK, ChunkedAdamW

wide, narrow = torch.float32, torch.bfloat16
for name, types in (
    ("fp32", [wide]),
    ("bf16", [narrow]),
    ("of three ranks, tied", [wide] * 3 + [narrow] * 3),
):
    # less than a piece, a piece and a bit, a whole chunk, several and a bit
    theirs = [torch.nn.Parameter(torch.randn(n)) for n in (1, 37, 130, CHUNK, 3 * CHUNK + 5)]
    masters = [p.detach().clone() for p in theirs]
    first, second = ([torch.zeros_like(m) for m in masters] for _ in range(2))
    copies = [torch.zeros_like(m, dtype=narrow) for m in masters] if narrow in types else []
    largest = [torch.tensor(1e9) for _ in copies]
    oracle, kernel = (
        torch.optim.AdamW(theirs, **settings),
        ChunkedAdamW(masters, first, second, copies, largest, types),
    )
    for step in (1.0, 2.0):
        gradients = [[torch.randn(len(m)).to(dtype) for dtype in types] for m in masters]
        for p, of_tensor in zip(theirs, gradients):
            p.grad = sum(gradient.double() for gradient in of_tensor).float()
        oracle.step()
        kernel(gradients, torch.tensor(step), **settings)
    found[name] = max((p - m).abs().max().item() for p, m in zip(theirs, masters))
    # the interpreter cuts off what the device rounds
    away = [((copy.float() - m) / m).abs().max().item() for copy, m in zip(copies, masters)]
    found[name + " copies"] = max(away, default=0)
    found[name + " largest"] = max(
        (abs(m - c.abs().max()).item() for m, c in zip(largest, copies)), default=0
    )
print(json.dumps(found))
"""

SPLIT = """
from cs336.model.fast.adamw_kernel import CHUNK, ChunkedAdamW
from cs336.model.fast.weights import joined_values, split_values

sizes, types = (1, 37, 130, CHUNK, 3 * CHUNK + 5), [torch.bfloat16]
whole = [torch.randn(n) for n in sizes]
copies, remainders = zip(*map(split_values, whole))
moments = [[torch.zeros(n) for n in sizes] for _ in range(4)]
largest = [torch.tensor(1e9) for _ in sizes]
others = [c.clone() for c in copies]
plain = ChunkedAdamW(whole, *moments[:2], others, [], types)
kernel = ChunkedAdamW(remainders, *moments[2:], copies, largest, types)
for step in (1.0, 2.0):
    gradients = [[torch.randn(n).bfloat16()] for n in sizes]
    for each in (plain, kernel):
        each(gradients, torch.tensor(step), **settings)
found["masters"] = all(
    torch.equal(joined_values(c, r), w) for c, r, w in zip(copies, remainders, whole)
)
found["copies"] = all(torch.equal(c, split_values(w)[0]) for c, w in zip(copies, whole))
found["largest"] = [m.item() - c.abs().max().item() for m, c in zip(largest, copies)]
found["remainders"] = [r.abs().max().item() for r in remainders]
for bits in (0x7FFFFFFF, -1, 0x7FC00000):  # NaN, of which a GPU makes the first
    nan = [[torch.full((n,), bits >> 16, dtype=torch.int16).view(torch.bfloat16)] for n in sizes]
    kernel(nan, torch.tensor(4.0), **settings)
    found[f"NaN {bits}"] = all(
        joined_values(c, r).isnan().all().item() for c, r in zip(copies, remainders)
    )
for c, r in zip(copies, remainders):  # together 0x7FFFFFFF, which a step leaves as it is
    c.fill_(-0.0), r.fill_(-1)
kernel(gradients, torch.tensor(5.0), **settings)
found["NaN of a GPU"] = all(
    joined_values(c, r).isnan().all().item() for c, r in zip(copies, remainders)
)
found["NaN in copies"] = all(c.isnan().all().item() for c in copies)
print(json.dumps(found))
"""

MOMENTS = """
from cs336.model.fast.adamw_kernel import CHUNK, ChunkedAdamW

theirs = [torch.nn.Parameter(torch.ones(n)) for n in (16 * CHUNK, 16 * CHUNK, CHUNK + 37)]
masters = [p.detach().clone() for p in theirs]
moments = [[torch.zeros_like(m, dtype=torch.bfloat16) for m in masters] for _ in range(2)]
oracle, kernel = (
    torch.optim.AdamW(theirs, **settings),
    ChunkedAdamW(masters, *moments, [], [], [torch.float32]),
)
patterns = []
for step in (1.0, 2.0):
    for moment in (*moments[0], *moments[1]):
        moment.zero_()
    kernel([[torch.full_like(m, -0.7)] for m in masters], torch.tensor(step), **settings)
    patterns += [moment.abs() > moment.abs().min() for each in moments for moment in each[:2]]
    if step == 1:
        for p in theirs:
            p.grad = torch.full_like(p, -0.7)
        oracle.step()
        away = max((p - m).abs().max().item() for p, m in zip(theirs, masters))
        kept = [[moment.float().tolist() for moment in each] for each in moments]
masters, moments = masters[2:], [each[2:] for each in moments]
kernel = ChunkedAdamW(masters, *moments, [], [], [torch.float32])
gradients = [[torch.full_like(m, torch.inf)] for m in masters]
kernel(gradients, torch.tensor(3.0), **settings)
infinite = all(moment.isinf().all().item() for each in moments for moment in each)
for bits in (0x7FFFFFFF, -1, 0x7FC00000):  # NaN, of which a GPU makes the first
    gradients = [[torch.full_like(m, bits, dtype=torch.int32).view(torch.float32)] for m in masters]
    kernel(gradients, torch.tensor(4.0), **settings)
nan = all(moment.isnan().all().item() for each in moments for moment in each)
alike = torch.corrcoef(torch.stack(patterns).float()).fill_diagonal_(0).abs().max().item()
print(json.dumps({"away": away, "kept": kept, "alike": alike, "infinite": infinite, "nan": nan}))
"""

LOSS = """
from cs336.model.fast import cross_entropy_kernel as kernel

block, found = kernel.BLOCK, {"loss": [], "alone": [], "gradient": [], "padding": []}
# 8 rows are more than there are programs
for vocab, padded in (
    (37, 40),
    (block, block),
    (block - 1, 2 * block + 5),
    (5000, 5120),
    (kernel.LONG_ROW, 17_000),
):
    logits, targets = 5 * torch.randn(8, padded), torch.randint(vocab, (8,))
    targets[:4] = torch.tensor([0, 1, vocab - 2, vocab - 1])
    real = logits[:, :vocab].clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(real, targets, reduction="none")
    (3 * expected.mean()).backward()
    alone = kernel.losses(logits, targets, vocab, 8, write_gradients=False)
    losses = kernel.losses(
        logits, targets, vocab, 2 * 8, write_gradients=True
    )  # of one of two parts
    kernel.multiply_rows(logits, torch.tensor(6.0))
    kernel.multiply_rows(logits, torch.tensor(1.0))
    errors = {
        "loss": losses - expected,
        "alone": alone - expected,
        "gradient": logits[:, :vocab] - real.grad,
        "padding": logits[:, vocab:],
    }
    for name, error in errors.items():
        found[name] += [error.abs().max().item()] if error.numel() else []
logits = torch.randn(3, 40)
before = logits.clone()
losses = kernel.losses(logits[:2, :37], torch.tensor([-100, 37]), 30, 2, write_gradients=True)
beside = (logits - before).abs()
found["unknown targets"] = [
    float(losses.isnan().all()),
    float(beside[:, 37:].sum() + beside[2].sum()),
]
print(json.dumps(found))
"""

PACKED = """
from cs336.model.fast import fused_blocks_kernel, packed, packed_kernel as kernel
from cs336.model.transformer import rope_rotations

fused_blocks_kernel.SUM_ROWS, fused_blocks_kernel.SUM_COLUMNS = (
    2,
    512,
)  # the interpreter takes as long for each program
# a row shorter than a block, one that fills it, one with a bit left; heads of 64 and 80
for batch, seq, heads, d_head in ((2, 5, 3, 8), (1, 3, 25, 64), (1, 2, 16, 64), (1, 2, 8, 80)):
    rotations = rope_rotations(seq, d_head, 10_000.0)
    x = torch.randn(batch, seq, 3 * heads * d_head)
    same(packed.rope_heads, kernel.rope_heads, x, rotations, None)
    # as attention returns them: heads before tokens
    parts = [torch.randn(batch, heads, seq, d_head).transpose(1, 2) for _ in range(3)]
    for measures in (False, True):
        given = *parts, rotations, measures
        same(packed._rope_heads_backward, kernel.rope_heads_backward, *given, has_maxima=True)
    here, there = x.clone(), x.clone()
    kernel.rotate(here, rotations)
    packed._rotate(there, rotations)
    compare("rotated in place", here, there)
    # the largest of all is in q, in v, or in nothing but rotated elements
    for at in ((0, 0, 1), (-1, -1, -1), None):
        here = x.clone()
        if at:
            here[at] = 9.0
        for measures in (False, True):
            there, result = here.clone(), here.clone()
            packed._rotate(there, rotations * torch.tensor((1, -1)))
            unit = kernel.rotate_back(result, rotations, measures)
            compare("rotated back in place", result, there)
            compare("unit of rotated", 448 * unit, there.abs().max().repeat(int(measures)))
    same(packed._cut_heads_backward, kernel.cut_heads_backward, *parts, torch.float32, True)
# rows of one tile, of several programs and of several tiles in each; columns of one block, and more
for batch, seq, width in ((1, 3, 24), (2, 23, 768), (1, 70, 512)):
    of_packed, gradient = torch.randn(batch, seq, 3 * width), torch.randn(batch, width, seq).mT
    of_q, _, of_v = of_packed.sum((0, 1)).chunk(3)
    for measures, last in ((False, gradient.sum((0, 1))), (True, of_v)):
        of_bias, unit = kernel.packed_bias_backward(
            of_packed, gradient, torch.float32, measures=measures
        )
        compare("bias of packed", of_bias, torch.cat((of_q, torch.zeros(width), last)))
        compare("unit of packed", 448 * unit, of_packed.abs().max().repeat(int(measures)))
    for at in ((0, 0, width), (-1, -1, -1)):
        of_packed[at] = torch.nan
        assert kernel.packed_bias_backward(of_packed, gradient, torch.float32, measures=True)[
            1
        ].isinf()
        of_packed[at] = 0.0
for width in (8, 24, kernel.PART, kernel.PART + 576):
    x, gradient = torch.randn(1, 3, 2 * width), torch.randn(1, 3, width)
    for tag in (None, torch.zeros(1)):
        same(packed._swiglu, kernel.swiglu, x, tag, has_maxima=True)
        given = x, gradient, tag is not None
        same(packed._swiglu_backward, kernel.swiglu_backward, *given, has_maxima=True)
print(json.dumps(found))
"""

BLOCKS = """
import numpy
from triton.runtime.interpreter import InterpreterBuilder
from cs336.model.fast import fused_blocks, fused_blocks_kernel as kernel

# a maximum that was not told to keep NaN drops it, as on a GPU
InterpreterBuilder.create_maxnumf = lambda self, one, other: self.binary_op(one, other, numpy.fmax)
tag = torch.zeros(1)
partial = torch.randn(2, kernel.SUM_ROWS + 7, 37)
compare("sums of programs", kernel.summed(partial, None)[0], partial.sum(1))
apart, last, _ = kernel.summed(partial, torch.bfloat16)
maxima = torch.rand(2 * kernel.SUM_ROWS * kernel.SUM_COLUMNS + 7)
for at in (0, -1):
    maxima[at] = 2.0 - at
    compare(
        "largest of programs",
        448 * kernel.summed(partial, None, maxima)[2],
        torch.tensor([2.0 - at]),
    )
compare("sums apart", apart, partial.sum(1)[:1])
assert (
    last.dtype is torch.bfloat16
    and ((last - partial.sum(1)[1]).abs() <= 2**-7 * partial.sum(1)[1].abs()).all()
)
kernel.SUM_ROWS, kernel.SUM_COLUMNS = 2, 512  # the interpreter takes as long for each program
# fewer rows than programs, as many as go round once and a bit; a row that fills its block, one that
# does not
for rows, width in ((1, 8), (7, 37), (9, 256), (3, kernel.GELU_COLUMNS + 576)):
    stream, branch, gradient = torch.randn(3, rows, width).unbind()
    gain, bias, branch_bias = torch.randn(3, width).unbind()
    kinds = ((False, False), (True, True), (True, False), (False, True))
    for is_centred, has_branch_bias in kinds if rows == 7 else kinds[:2]:
        given = (
            stream,
            branch,
            branch_bias if has_branch_bias else None,
            gain,
            bias if is_centred else None,
            1e-5,
        )
        total, _, statistics, _ = same(
            fused_blocks._add_norm,
            kernel.add_norm,
            *given,
            torch.float32,
            None,
            True,
            has_maxima=True,
        )
        alone = (total, None, None, *given[3:])
        same(fused_blocks._add_norm, kernel.add_norm, *alone, torch.float32, None, False)
        for stream_gradient in (None, torch.randn(rows, width)):
            # a branch of another type than the stream has a gradient of its own
            of_branch = gradient if stream_gradient is None else gradient.double()
            back = stream_gradient, of_branch, total, statistics, gain, is_centred
            branch_bias_type = torch.float32 if has_branch_bias else None
            same(
                fused_blocks._add_norm_backward,
                kernel.add_norm_backward,
                *back,
                branch_bias_type,
                True,
            )
    # tokens that come once, several times and not at all
    same(
        fused_blocks._lookup_backward,
        kernel.lookup_backward,
        gradient,
        torch.randint(0, 9, (rows,)),
        11,
    )
    same(fused_blocks._bias_gelu, kernel.bias_gelu, stream, bias, tag, has_maxima=True)
    same(fused_blocks._bias_gelu, kernel.bias_gelu, stream, bias, None)
    same(fused_blocks._bias_gelu_backward, kernel.bias_gelu_backward, stream, bias, gradient, True)
    for wrong, at in (
        ((float("nan"), 0), (float("nan"), -1), (float("inf"), -1)) if rows in (3, 7) else ()
    ):
        spoilt = gradient.clone()
        spoilt[at, at] = wrong
        units = (
            kernel.add_norm_backward(None, spoilt, total, statistics, gain, is_centred, None, True)[
                4
            ],
            (kernel.bias_gelu_backward(stream, bias, spoilt, True)[2]),
        )
        assert (
            all(unit.isinf() for unit in units)
            and kernel.bias_gelu(spoilt, bias, tag)[1].isinf().any()
        )
print(json.dumps(found))
"""

CASTS = """
from cs336.model.fast import fp8, fused_blocks_kernel as kernel

found = []
# one program, several, and parts that a matrix fills or not; nothing is rounded, which the
# interpreter does wrongly
tile = kernel.CAST_ROWS, kernel.CAST_COLUMNS
for rows, columns in ((16, 16), tile, (tile[0] + 16, 2 * tile[1] + 48)):
    for dtype in (torch.float32, torch.bfloat16):
        cast = (30 * torch.randn(rows, columns)).to(torch.float8_e4m3fn).float()
        cast[0, 0] = fp8.MAX
        x = (cast / 128).to(dtype)
        for transposes in (False, True):
            here, transpose = kernel.casts(x, fp8.scale_of(x.abs()), transposes)
            wanted = cast.t() if transposes else torch.empty(0, 0)
            found.append(torch.equal(here.float(), cast) and torch.equal(transpose.float(), wanted))
print(json.dumps(found))
"""

WHOLE = """
import json, torch
from dataclasses import replace
from tests.model.fast.steps import COPIED, MODEL, drawn_step, gradients

found, BACKEND = [], "aot_eager_default_partitioner"  # whatever it saves for backward
for num_layers, fp8 in ((1, False), (2, True)):
    model = replace(MODEL, arch="gpt2", num_layers=num_layers)
    step = drawn_step(replace(COPIED, model=model, fused_blocks=True, fp8=fp8))
    losses = (
        step.trainable.loss,
        torch.compile(step.trainable.loss, backend=BACKEND, fullgraph=True),
    )
    both = []
    for loss_of in losses:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(*step.batches())
        step.model.zero_grad()
        loss.backward()
        both.append({"loss": loss.detach(), **gradients(step)})
    eager, compiled = both
    found.append(
        max(
            (compiled[name] - each).norm() / each.norm()
            for name, each in eager.items()
            if not name.endswith("k_proj.bias")
        ).item()
    )
print(json.dumps(found))
"""

COMPILED = """
import itertools, json, sys, torch, torch._dynamo, torch._inductor.decomposition
from collections import Counter
from dataclasses import replace
from cs336.config import Arch
from tests.model.fast.test_selective import BASE, SELECTIVE, backward

sys.modules["torch._inductor.compile_fx"] = torch._inductor.decomposition
compile = torch.nn.Module.compile
# what Inductor does, but for its kernels, so that each operator is seen
torch.nn.Module.compile = lambda self, **_: compile(
    self, backend="aot_eager_decomp_partition", fullgraph=True
)
found = {}
for arch, packs, rounds in itertools.product(Arch, (False, True), (False, True)):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    changes = {"packed_attention": packs, "bf16_stream": rounds}
    changes["model"] = replace(BASE.model, arch=arch)
    selective = replace(SELECTIVE, keep_hidden=1, **changes)
    plain = backward(replace(BASE, **changes))[2]
    expected, expected_bytes, _ = backward(selective)
    gradients, saved, calls = backward(replace(selective, compile="default", compile_blocks=True))
    more = Counter(calls)
    more.subtract(plain)
    found[f"{arch} {packs} {rounds}"] = {
        "equal": all(torch.equal(gradients[name], each) for name, each in expected.items()),
        "saved_bytes": [saved, expected_bytes],
        "attention": [name for name in calls if "attend" in name and "backward" not in name],
        "matmuls": more["mm"] + more["addmm"],
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    }
print(json.dumps(found))
"""

FORKS = """
import gc, json, os, sys, traceback, torch._dynamo.backends.common, tests.model.fast.test_selective

gc.freeze()
for line in sys.stdin:
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.dup2(writer, 1)
        try:
            exec(json.loads(line), {})
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(0)
    os.close(writer)
    print(json.dumps(open(reader).read()), flush=True)
    os.wait()
"""


@pytest.fixture(scope="module")
def in_fresh_process():
    """What a script prints, in a process of its own, forked off one that has imported PyTorch and
    its compiler.

    Whether to interpret is decided when a kernel is defined.
    """
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-W", "ignore", "-c", FORKS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        words, env=environment, cwd=Path(__file__).parents[3], **pipes
    ) as process:

        def run(script):
            print(json.dumps(script), file=process.stdin, flush=True)
            printed = json.loads(process.stdout.readline())
            assert printed.startswith(("{", "[")), printed
            return json.loads(printed)

        yield run
        process.stdin.close()


@pytest.fixture
def interpreted(in_fresh_process):
    pytest.importorskip("triton")
    return lambda script: in_fresh_process(COMMON + script)


def test_adamw_does_what_pytorch_s_does(interpreted):
    result = interpreted(ADAMW)
    assert all(
        error < (2**-7 if name.endswith("copies") else 1e-6) for name, error in result.items()
    ), result
    assert result["bf16 copies"] > 0


def test_adamw_of_split_masters_is_that_of_whole_ones_to_the_last_bit(interpreted):
    result = interpreted(SPLIT)
    assert result["masters"] is result["copies"] is True
    assert set(result["largest"]) == {0}
    assert min(result["remainders"]) > 0, "else nothing tells these masters from their copies"
    assert all(result[name] for name in result if name.startswith("NaN"))


def test_the_loss_and_its_gradient_are_pytorch_s(interpreted):
    result = interpreted(LOSS)
    assert result.pop("unknown targets") == [1, 0], "no loss, and nothing written beside the row"
    assert set(result.pop("padding")) == {0}
    assert all(error < 1e-5 for error in chain.from_iterable(result.values())), result


def test_what_follows_packed_matmuls_is_what_pytorch_computes(interpreted):
    result = interpreted(PACKED)
    assert len(result) == 17
    assert all(error < 1e-5 for error in chain.from_iterable(result.values())), result


def test_adamw_rounds_moments_to_one_of_their_neighbours_in_bf16_and_on_average_not_at_all(
    interpreted,
):
    """All elements are alike, so that the noise alone tells them apart: by element, moment, tensor
    and step.

    Which ones are rounded up in 8 such patterns of 16,384 elements is uncorrelated, to five
    standard deviations.
    """
    result = interpreted(MOMENTS)
    assert result["away"] < 1e-5
    for moments, exact in zip(result["kept"], (0.1 * -0.7, 0.05 * 0.7**2), strict=True):
        for values in moments:
            assert_rounded_at_random(torch.tensor(values), exact)
    assert result["alike"] < 5 / math.sqrt(16_384)
    assert result["infinite"]
    assert result["nan"]


def test_what_is_between_matmuls_is_what_pytorch_computes(interpreted):
    result = interpreted(BLOCKS)
    assert len(result) == 18
    assert all(error < 1e-5 for error in chain.from_iterable(result.values())), result


def test_casts_to_fp8_are_pytorch_s_and_their_transposes(interpreted):
    result = interpreted(CASTS)
    assert len(result) == 12
    assert all(result)


def test_the_whole_model_compiles_without_a_break(in_fresh_process):
    """The compiler takes operations apart and rounds at other places, which may be a place of
    e4m3 for an element.
    """
    in_bf16, in_fp8 = in_fresh_process(WHOLE)
    assert in_bf16 < 0.02
    assert in_fp8 < 0.1


def test_selective_checkpoints_save_as_much_when_compiled(in_fresh_process):
    for name, result in in_fresh_process(COMPILED).items():
        assert result["equal"], name
        assert result["saved_bytes"][0] == result["saved_bytes"][1], name
        assert result["graphs"] == 2, "blocks of one kind are compiled once"
        assert result["attention"] == [], name
        assert result["matmuls"] == 2 * MODEL.num_layers - 1, name
