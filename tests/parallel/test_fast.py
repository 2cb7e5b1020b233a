"""The fast model on ranks: weights in low precision whose gradients are averaged, and masters
that are shared out.
"""

import functools

import pytest
import torch

from cs336.measure.step import TrainingStep
from cs336.parallel import packs
from cs336.parallel.fast_sharded import ShardedMasterAdamW
from tests.model.fast.steps import OF_AN_UPDATE
from tests.parallel import fast
from tests.rounding import of_chain

pytestmark = pytest.mark.timeout(280)
ALL = [
    (way, shard)
    for way in ("ddp-naive", "ddp-flat", "ddp-overlap", "ddp-push")
    for shard in (False, True)
]
PUSHED, PUSHED_PARTS, REDUCED, SHARDED = (
    ("ddp-push", False),
    ("ddp-push", True),
    ("ddp-overlap", True),
    ("fsdp", False),
)
SELECTIVE = {"checkpoint_blocks": 1, "selective_checkpoints": True, "keep_hidden": 1}
SETTINGS = {
    "plain": ({}, (*ALL, SHARDED, ("fsdp-push", False))),
    "packed attention": ({"packed_attention": True}, (PUSHED_PARTS, SHARDED)),
    "selective checkpoints": (SELECTIVE, (REDUCED, SHARDED)),
    "micro-batches": ({"accumulate_steps": 3}, (SHARDED,)),
    "loss in parts": ({"loss_chunks": 3}, (PUSHED, REDUCED, SHARDED)),
    "moments in bf16": (
        {"bf16_moments": True},
        (PUSHED, PUSHED_PARTS, ("ddp-flat", True), SHARDED),
    ),
    "embedding in fp32": (
        {"bf16_embedding": False},
        (("ddp-overlap", False), REDUCED, PUSHED_PARTS, SHARDED),
    ),
    "split masters": (
        {"split_masters": True},
        (("ddp-overlap", False), PUSHED, PUSHED_PARTS, SHARDED),
    ),
}
"""Settings, the ways and whether the optimizer is sharded."""


def of_updates(name):
    """How far rounding takes the ranks' updates from those of one process, relative to these,
    for one order of sums.
    """
    # drawn for parts of tensors: each is up to two units off, and the root of one is one
    if name == "moments in bf16":
        return of_chain(torch.bfloat16, 3 * (fast.STEPS - 1))
    return 0


@functools.cache
def alone(ranks, arch, name, axes_in_fp32):
    return ranks.call("tests.parallel.fast:train_alone", arch, 2, axes_in_fp32, SETTINGS[name][0])[
        0
    ]


@pytest.mark.parametrize(
    ("name", "way", "shard"), [(name, *way) for name, (_, ways) in SETTINGS.items() for way in ways]
)
@pytest.mark.parametrize("arch", ["cs336", "gpt2"])
def test_training_on_two_ranks_is_that_of_one_process_that_averages(two, name, way, shard, arch):
    """Where gradients are pushed, the optimizer adds them up, in fp32; under FSDP vectors are
    not sharded.
    """
    changes, _ = SETTINGS[name]
    of_fp32, of_others = (of_chain(torch.float32, OF_AN_UPDATE * fast.STEPS), of_updates(name))
    start, expected, losses = alone(two, arch, name, {"ddp-push": 1, "fsdp-push": 2}.get(way))
    results = two.call("tests.parallel.fast:train", way, arch, shard, "cpu", changes)
    shape = fast.config_of(arch, **changes).model
    vectors = sum(master.numel() for master in expected.values() if master.ndim == 1)
    matrices = sum(master.numel() for master in expected.values() if master.ndim > 1)
    table, head = shape.vocab_size * shape.d_model, 128 * shape.d_model
    for rank, (masters, updated, own_losses, sent, copies) in enumerate(results):
        assert own_losses == pytest.approx(
            [of_ranks[rank] for of_ranks in losses], rel=of_fp32 + of_others
        )
        assert masters.keys() == expected.keys()
        for key, master in expected.items():
            if not key.endswith("k_proj.bias"):  # whose gradient is nothing but rounding
                allowed = of_fp32 * master.norm() + of_others * (master - start[key]).norm()
                assert (masters[key] - master).norm() <= allowed, key
        assert all(torch.equal(master, results[0][0][name]) for name, master in masters.items())
        is_wide = name == "embedding in fp32"
        if way.startswith("ddp"):
            assert all(
                torch.equal(one, other) for one, other in zip(copies, results[0][-1], strict=True)
            )
            assert updated == (matrices // 2 if shard else matrices) + vectors
            assert sent == sent_by_data_parallelism(masters, shape, way, shard, is_wide)
            continue
        assert updated == (matrices + head - table) // 2 + vectors
        if arch == "cs336" and name in ("plain", "embedding in fp32"):
            # half of what is gathered is sent, of the blocks once more for backward, and half of
            # all gradients
            blocks = 2 * (matrices - 2 * table)
            flags = 8 if way == "fsdp-push" else 0
            tables = 2 * head + (4 if is_wide else 2) * table
            assert sent == (2 * (blocks + tables) + blocks) // 2 + 4 * vectors + flags


@pytest.mark.parametrize(
    ("way", "micro_batches"),
    [("ddp-overlap", 1), ("ddp-overlap", 2), ("ddp-push", 1), ("ddp-push", 4), ("fsdp-push", 1)],
)
def test_logits_have_the_gradient_that_backward_wants_when_forward_has_written_it(
    two, way, micro_batches
):
    """A second pass over gpt2's logits would take 3 % of its step. Gradients of ranks are averaged
    by collectives, and only added up where ranks copy them.
    """
    for factors in two.call("tests.parallel.fast:missing_factors", way, micro_batches):
        assert factors == [1.0] * micro_batches


@pytest.mark.parametrize("way", ["ddp-push", "fsdp-push"])
def test_all_of_three_ranks_add_up_what_was_pushed_in_one_order(three, way):
    """In another order sums of three would be rounded otherwise."""
    first, *others = (
        masters for masters, *_ in three.call("tests.parallel.fast:train", way, "cs336", False)
    )
    for other in others:
        assert all(torch.equal(other[name], master) for name, master in first.items())


@pytest.mark.parametrize(
    ("way", "shard"), [("ddp-push", False), ("ddp-push", True), ("ddp-flat", True), ("fsdp", False)]
)
def test_frozen_matrices_and_no_others_stay_as_they_are(two, way, shard):
    for changed in two.call("tests.parallel.fast:train_frozen", way, shard):
        matrices = [f"attn.{name}_proj" for name in ("q", "k", "v", "output")] + [
            f"ffn.w{n}" for n in (1, 2, 3)
        ]
        expected = [f"layers.{block}.{name}.weight" for block in (0, 2) for name in matrices]
        assert sorted(changed) == sorted(["token_embeddings.weight", *expected, "lm_head.weight"])


def test_parts_of_packed_weights_of_which_some_are_frozen_are_refused(monkeypatch):
    """A rank has a part of q and k, and another one of k and v."""
    step = TrainingStep(fast.config_of("cs336"))
    step.model.layers[1].attn.k_proj.requires_grad_(False)
    monkeypatch.setattr(packs.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(packs.dist, "get_rank", lambda: 0)
    with pytest.raises(
        ValueError, match=r"layers\.1\.attn\.v_proj\.weight are one tensor.*freeze all or none"
    ):
        ShardedMasterAdamW(step.model, 1e-3)


@pytest.mark.parametrize(
    ("way", "shard"), [("ddp-push", False), ("ddp-overlap", True), ("fsdp", False)]
)
def test_a_rank_keeps_two_bytes_beside_each_element_of_a_copy(two, way, shard):
    for elements, remainders, masters in two.call("tests.parallel.fast:kept", way, shard):
        assert (remainders, masters) == (2 * elements, 0)


def sent_by_data_parallelism(whole, shape, way, shard, is_wide):
    """Each of two ranks sends all bytes of a gradient for its average; half for its part, and
    half for a copy. A table that `is_wide`, looked up in fp32, has such a gradient; that of gpt2,
    which is the head too, has both.
    """
    wide = {name for name in whole if "ln" in name or "positions" in name}
    narrow = whole.keys() - wide
    if is_wide:
        wide.add("token_embeddings.weight")
        if "lm_head.weight" in whole:
            narrow.remove("token_embeddings.weight")
    by_type = {4: wide, 2: narrow}
    expected = sum(
        width * whole[name].numel() for width, names in by_type.items() for name in names
    )
    if not shard:  # averaged with the rows that pad it
        expected += 2 * (128 - shape.vocab_size) * shape.d_model
    # copies to the others are followed by all-reduces of 4 bytes
    return expected + (0 if not way.endswith("push") else 12 if shard else 8)
