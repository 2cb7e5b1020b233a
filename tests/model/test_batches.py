"""Batches are what they are said to be, and a token file that is not one is a clear error that
names it.
"""

import gzip
import io
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from cs336.config import Device, ModelConfig, Parallel, RunConfig
from cs336.model.batches import make_batches
from cs336.model.tokens import open_tokens

MODEL = ModelConfig(
    vocab_size=50_000, context_length=8, d_model=8, d_ff=12, num_layers=1, num_heads=2
)
CONFIG = RunConfig(size="custom", model=MODEL, batch_size=5)


def assert_well_formed(batch, vocab_size=MODEL.vocab_size):
    for part in batch:
        assert part.dtype == torch.int64
        assert part.shape == (5, 8)
        assert part.is_contiguous()
        assert 0 <= part.min() <= part.max() < vocab_size
    tokens, targets = batch
    assert torch.equal(tokens[:, 1:], targets[:, :-1]), "the targets are the tokens, shifted by one"


def test_random_batches_follow_the_seed_and_stay_the_same():
    batches = make_batches(CONFIG)
    batch = batches()
    assert_well_formed(batch)
    assert all(a is b for a, b in zip(batch, batches(), strict=True)), (
        "nothing is made during a step"
    )
    again, other = make_batches(CONFIG)(), make_batches(replace(CONFIG, seed=1))()
    assert all(torch.equal(a, b) for a, b in zip(batch, again, strict=True))
    assert not torch.equal(batch[0], other[0])


def token_file(path, tokens, dtype=np.uint16):
    np.save(path, np.asarray(tokens, dtype=dtype))
    return replace(CONFIG, tokens=str(path))


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, np.uint64, ">u2"])
def test_batches_of_a_file_are_its_slices(tmp_path, dtype):
    """Every token is its own position, beyond the range of int16."""
    config = token_file(tmp_path / "tokens.npy", range(49_990), dtype)
    batches = make_batches(config)
    drawn = [batches() for _ in range(20)]
    for tokens, targets in drawn:
        assert_well_formed((tokens, targets))
        assert torch.equal(targets, tokens + 1)
        assert torch.equal(tokens, tokens[:, :1] + torch.arange(8))
    starts = torch.cat([tokens[:, 0] for tokens, _ in drawn])
    assert len(set(starts.tolist())) > 90, "slices start anywhere"
    assert starts.max() > 2**15
    again, other = make_batches(config), make_batches(replace(config, seed=1))
    assert all(torch.equal(batch[0], again()[0]) for batch in drawn)
    assert not torch.equal(drawn[0][0], other()[0])


def test_a_file_just_long_enough_has_one_slice_and_every_token_is_reached(tmp_path):
    tokens, targets = make_batches(token_file(tmp_path / "x.npy", range(9)))()
    assert torch.equal(tokens, torch.arange(8).expand(5, 8))
    assert torch.equal(targets, torch.arange(1, 9).expand(5, 8))
    batches = make_batches(token_file(tmp_path / "y.npy", range(10)))
    starts = {int(start) for _ in range(20) for start in batches()[0][:, 0]}
    assert starts == {0, 1}


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [
        (np.uint16, 50_000),
        (np.uint16, 65_535),
        (np.int32, 2**31 - 1),
        (np.int32, -1),
        (np.uint64, 2**64 - 1),
    ],
)
def test_a_token_outside_the_vocabulary_is_an_error_that_names_the_file(tmp_path, dtype, bad):
    config = token_file(tmp_path / "tokens.npy", [0, 1, 2, 3, 4, bad, 6, 7, 8], dtype)
    with pytest.raises(
        ValueError,
        match=rf"tokens\.npy: tokens must be from 0 to vocab_size - 1 = 49999, found .*{bad}",
    ):
        make_batches(config)()


def test_a_file_is_mapped_and_not_read(tmp_path):
    path, length = tmp_path / "large.npy", 2**29
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<u2", "fortran_order": False, "shape": (length,)}
        )
        file.truncate(file.tell() + 2 * length)
    before = psutil.Process().memory_info().rss
    batches = make_batches(replace(CONFIG, tokens=str(path)))
    assert_well_formed(batches())
    assert psutil.Process().memory_info().rss - before < 100 * 2**20


def test_no_broken_file_is_taken_for_tokens_and_none_is_unpickled_or_waited_for(tmp_path):
    whole, objects = tmp_path / "whole.npy", tmp_path / "objects.npy"
    np.save(whole, np.arange(100, dtype=np.uint16))
    np.save(objects, np.array([{}], dtype=object), allow_pickle=True)
    broken = {
        "empty": b"",
        "text": b"1 2 3 4 5 6 7 8 9\n",
        "nul bytes": bytes(1000),
        "objects": objects.read_bytes(),
        "cut in the data": whole.read_bytes()[:-1],
        "cut in the header": whole.read_bytes()[:40],
        "code as a header": b"\x93NUMPY\1\0\x0f\0exit('executed')",
        "longer than the file": whole.read_bytes().replace(b"(100,)", b"(101,)"),
    }
    for name, content in broken.items():
        path = tmp_path / f"{name}.npy"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=str(path)) as caught:
            open_tokens(path, context_length=4)
        assert "\n" not in str(caught.value), name
    os.mkfifo(tmp_path / "fifo.npy")
    (tmp_path / "directory.npy").mkdir()
    for path in (
        *(tmp_path / f"{name}.npy" for name in ("fifo", "directory", "missing", "nul\0")),
        Path("/dev/zero"),
    ):
        with pytest.raises(ValueError, match=f"{path}: "):
            open_tokens(path, context_length=4)
    with pytest.raises(
        ValueError, match=r"whole\.npy: needed more than context_length = 100 tokens, found 100"
    ):
        open_tokens(whole, context_length=100)


@pytest.mark.parametrize(
    ("array", "result"),
    [
        (np.arange(100, dtype=np.float32), "1 axes of float32"),
        (np.ones(100, bool), "1 axes of bool"),
        (np.arange(100, dtype=np.uint16).reshape(10, 10), "2 axes of uint16"),
        (np.zeros((), np.uint16), "0 axes of uint16"),
        (np.zeros(100, "u2,u2"), "1 axes of"),
    ],
)
def test_tokens_of_another_type_or_shape_come_with_the_line_that_converts_them(
    tmp_path, array, result
):
    path = tmp_path / "it's.npy"
    np.save(path, array)
    with pytest.raises(
        ValueError, match=f"{path}: needed one axis of integers, found {result}"
    ) as caught:
        open_tokens(path, context_length=4)
    is_lossless = np.issubdtype(array.dtype, np.integer)
    assert ("converted by" in str(caught.value)) is is_lossless
    if is_lossless and array.ndim:
        exec(str(caught.value).partition("converted by ")[2], {"numpy": np})
        [converted] = (other for other in tmp_path.iterdir() if other != path)
        assert (
            open_tokens(converted, context_length=4).tolist() == array.ravel().astype(int).tolist()
        )
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "train.bin")
    with pytest.raises(ValueError, match=r"not a \.npy file") as caught:
        open_tokens(tmp_path / "train.bin", context_length=4)
    exec(str(caught.value).partition("converted by ")[2], {"numpy": np})
    assert open_tokens(tmp_path / "train.bin.npy", context_length=4).tolist() == list(range(100))


@pytest.mark.parametrize("seed", range(40))
def test_a_conversion_is_advised_only_where_it_gives_the_tokens(tmp_path, seed):
    """Drawn files that are no tokens yet, and whether one of the lines would make them of it."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 50_000, 2 * rng.integers(50, 3000)).astype(np.uint16)
    whole, archive = io.BytesIO(), io.BytesIO()
    np.save(whole, tokens)
    np.savez(archive, tokens=tokens)
    content, is_right = [
        (tokens.tobytes(), True),
        (tokens.tobytes() + b"x", False),
        (whole.getvalue()[: -2 * rng.integers(1, 30)], False),
        (archive.getvalue() + b" " * (len(archive.getvalue()) % 2), False),
        (gzip.compress(bytes(tokens)) + b"\0", False),
        (" ".join(map(str, tokens)).encode() + b"\n\n", False),
        ("Größe, 大 ".encode() * 100, False),
        (b"", False),
    ][seed % 8]
    path = tmp_path / "tokens.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"not a \.npy file of numbers") as caught:
        open_tokens(path, context_length=4)
    _, _, line = str(caught.value).partition("converted by ")
    assert bool(line) is is_right
    if line:
        exec(line, {"numpy": np})
        assert open_tokens(tmp_path / "tokens.bin.npy", 4).tolist() == tokens.tolist()


@pytest.mark.parametrize("bad", [-1, 50_000])
def test_a_vocabulary_is_advised_only_against_tokens_above_it(tmp_path, bad):
    batches = make_batches(token_file(tmp_path / "t.npy", [bad] * 100, np.int32))
    with pytest.raises(ValueError, match=f"found {bad} to {bad}") as caught:
        batches()
    assert ("--vocab-size" in str(caught.value)) is (bad > 0)


@pytest.mark.gpu
def test_batches_on_the_gpu_are_those_of_the_cpu(tmp_path):
    """Also when the host runs ahead of the copies."""
    config = token_file(tmp_path / "x.npy", np.random.default_rng(0).integers(50_000, size=10**6))
    on_cpu, on_gpu = make_batches(config), make_batches(replace(config, device=Device.CUDA))
    torch.cuda._sleep(500_000_000)
    pairs = [(on_cpu(), on_gpu()) for _ in range(50)]
    for expected, result in pairs:
        assert result[0].is_cuda
        assert all(torch.equal(a, b.cpu()) for a, b in zip(expected, result, strict=True))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_batch_of_one_process(tmp_path, ranks):
    np.save(tmp_path / "t.npy", np.arange(1000) % 11)
    for tokens in (None, str(tmp_path / "t.npy")):
        whole = make_batches(replace(CONFIG, tokens=tokens, batch_size=2 * ranks))
        shared = replace(CONFIG, tokens=tokens, batch_size=2, parallel=Parallel.DDP, ranks=ranks)
        by_rank = [make_batches(shared, rank) for rank in range(ranks)]
        for _ in range(3):
            for expected, *parts in zip(whole(), *(batches() for batches in by_rank), strict=True):
                assert torch.equal(torch.cat(parts), expected)
