"""Each way on ranks is training in one process with the whole batch; and what each keeps and
sends.
"""

import functools

import pytest
import torch

from cs336.config import Mode, ModelConfig, Parallel, Precision, RunConfig
from cs336.costs.accounting import count_parameters
from tests.costs.live import sent_bytes
from tests.model.fast.steps import OF_AN_UPDATE, roundings
from tests.parallel import checks
from tests.parallel.checks import BATCH, OPTIMIZERS, SHAPE, STEPS, WAYS
from tests.parallel.fast import config_of
from tests.rounding import of_chain, of_walk

pytestmark = pytest.mark.timeout(280)
DDP_WAYS = [way for way in WAYS if way.startswith("ddp")]
FSDP_WAYS = ["fsdp", "fsdp-push", "fsdp2"]
TRAIN = "tests.parallel.checks:train"


@functools.cache
def alone(ranks, *arguments, **options):
    """Trained by one of the ranks, because the checks of shapes in this process take longer than
    the training.
    """
    return ranks.call(TRAIN, None, *arguments, **options)[0]


def distance(result, expected):
    """The largest relative difference of a parameter.

    Those of keys are left out, as a bias of keys has no gradient in exact arithmetic (softmax takes
    no notice of what is added to all scores of a query) and AdamW makes much of rounding.
    """
    assert result.keys() >= expected.keys()
    return max(
        float((result[name] - whole).norm() / whole.norm())
        for name, whole in expected.items()
        if not name.endswith("k_proj.bias")
    )


def check_trained_as_alone(
    ranks, way, kind, optimizer, dtype=torch.float32, *, backwards=1, **options
):
    expected = alone(ranks, kind, optimizer, dtype, backwards=backwards).weights
    tolerance = of_walk(dtype, 2 * STEPS * roundings(ModelConfig(**SHAPE)))
    for result in ranks.call(TRAIN, way, kind, optimizer, dtype, backwards=backwards, **options):
        assert distance(result.weights, expected) < tolerance


@pytest.mark.parametrize("way", WAYS)
def test_steps_on_two_ranks_are_those_with_the_whole_batch(two, way):
    """SGD's updates, unlike AdamW's, have the scale of the gradients."""
    check_trained_as_alone(two, way, "gpt2", "sgd")


def test_compiled_blocks_are_gathered_outside_of_what_is_compiled(two):
    check_trained_as_alone(two, "fsdp", "gpt2", "sgd", compiled=True)


@pytest.mark.parametrize("way", WAYS)
def test_frozen_and_unused_parameters_and_buffers(two, way):
    """The ranks' own buffers and weights differ at first, by their seeds."""
    check_trained_as_alone(two, way, "spare", "adamw", torch.float64)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", ["ddp-naive", "ddp-push"])
def test_a_sharded_optimizer_updates_as_a_whole_one(two, way, optimizer):
    check_trained_as_alone(two, way, "gpt2", optimizer, shard=True)


@pytest.mark.parametrize(
    ("way", "shard"),
    [("ddp-overlap", True), ("ddp-push", False), ("fsdp", False), ("fsdp-push", False)],
)
def test_three_ranks_share_what_three_does_not_divide(three, way, shard):
    assert SHAPE["vocab_size"] % 3
    check_trained_as_alone(three, way, "gpt2", "sgd", torch.float64, shard=shard)


def test_each_rank_has_its_share_of_the_state(two):
    model = checks.make_model("gpt2", 0, torch.float32)
    whole = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.1)
    (only,) = whole.param_groups
    later = {"params": only["params"][7:], "lr": 0.25, "weight_decay": 0.1}
    only["params"] = only["params"][:7]
    whole.add_param_group(later)
    for factor in (1, 0.5):
        for group, lr in zip(whole.param_groups, (0.5, 0.25), strict=True):
            group["lr"] = lr * factor
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        whole.step()
    states = two.call("tests.parallel.checks:shared_states")
    elements = [count for count, _, _ in states]
    total = sum(parameter.numel() for parameter in model.parameters())
    largest = max(parameter.numel() for parameter in model.parameters())
    assert sum(elements) == total
    assert max(elements) - min(elements) <= largest
    for _, rates, weights in states:
        assert rates == [0.25, 0.125]
        assert distance(weights, checks.weights_of(model)) < of_chain(
            torch.float32, 2 * OF_AN_UPDATE
        )


@pytest.mark.parametrize("way", ["ddp-naive", "ddp-flat", "ddp-overlap"])
def test_ranks_that_use_different_parameters_are_told_which(two, way):
    with pytest.raises(AssertionError, match=r"a\.weight has a gradient on 1 of 2 ranks"):
        two.call("tests.parallel.checks:train_different_parts", way)


@pytest.mark.parametrize("way", ["ddp-naive", "ddp-flat", "ddp-push", "fsdp"])
def test_gradients_of_several_backwards_are_averaged_as_their_sum(two, way):
    check_trained_as_alone(two, way, "cs336", "sgd", torch.float64, backwards=2)


@pytest.mark.parametrize("way", ["ddp-overlap", "fsdp-push"])
def test_a_way_that_averages_during_backward_refuses_a_second_one(two, way):
    with pytest.raises(AssertionError, match="finish_gradient_synchronization"):
        two.call(TRAIN, way, "cs336", backwards=2)


def test_low_precision_is_gathered_and_the_masters_are_not(two):
    expected = alone(two, "cs336", in_bf16=True).loss
    d_model, vocab_size = SHAPE["d_model"], SHAPE["vocab_size"]
    allowed = of_walk(
        torch.bfloat16, 2 * roundings(ModelConfig(**SHAPE)), BATCH * SHAPE["context_length"]
    )
    for way in FSDP_WAYS:
        of_ranks = two.call(TRAIN, way, "cs336", in_bf16=True)
        for trained in of_ranks if way != "fsdp2" else ():
            assert trained.in_forward == {
                "token_embeddings": (torch.float32, (vocab_size, d_model)),
                "layers.1.ln1": (torch.float32, (d_model,)),
                "layers.1.attn.q_proj": (torch.bfloat16, (d_model, d_model)),
                "lm_head": (torch.bfloat16, (vocab_size, d_model)),
            }
            assert trained.gradients == {torch.float32}
            assert {whole.dtype for whole in trained.weights.values()} == {torch.float32}
        assert sum(trained.loss for trained in of_ranks) / 2 == pytest.approx(expected, abs=allowed)


def test_what_is_gathered_is_freed_and_shards_are_parts(two):
    model = checks.make_model("cs336", 0, torch.float32)
    whole = dict(model.named_parameters())
    block = model.layers[0].parameters()
    block_bytes = sum(parameter.nbytes for parameter in block if parameter.ndim == 2)
    for shapes, gradients, between, gathered in two.call("tests.parallel.checks:shards"):
        for name, parameter in whole.items():
            is_matrix = parameter.ndim == 2
            shape = (-(-parameter.numel() // 2),) if is_matrix else parameter.shape
            assert shapes[name] == gradients[name] == shape
        assert between == [0, 0, 0]
        # in a block's forward: itself and the next two units, the last of which is the head
        head_bytes = 2 * -(-whole["lm_head.weight"].numel() // 2) * 4
        assert gathered[-3:] == [
            3 * block_bytes,
            2 * block_bytes + head_bytes,
            block_bytes + head_bytes,
        ]


@pytest.mark.parametrize("way", WAYS)
def test_bytes_sent_are_those_of_the_closed_form(two, way):
    """PyTorch's DDP has padding in its buckets."""
    config = RunConfig(
        size="custom",
        model=ModelConfig(**SHAPE),
        batch_size=2,
        mode=Mode.FORWARD_BACKWARD,
        parallel=Parallel(way),
        ranks=2,
    )
    for forward, backward, after in two.call("tests.parallel.checks:traffic_of", way, "cs336"):
        total = forward + backward + after
        assert total == pytest.approx(sent_bytes(config), abs=256 if way == "ddp" else 0)
        if way in DDP_WAYS:
            # copies are followed by two all-reduces of 4 bytes
            flags = 8 if way == "ddp-push" else 0
            assert not forward
            assert (backward > 0) == (way in ("ddp-overlap", "ddp-push", "ddp"))
            assert (after > flags) == (way in ("ddp-naive", "ddp-flat"))


PLAIN = {
    "cast_once": False,
    "fused_blocks": False,
    "bf16_embedding": False,
    "fused_loss": False,
    "pad_vocabulary": 1,
}
SHAPE_OF_FAST = config_of("cs336", num_layers=3).model
TABLE = SHAPE_OF_FAST.vocab_size * SHAPE_OF_FAST.d_model
PADDED = 128 * SHAPE_OF_FAST.d_model
VECTORS = (2 * SHAPE_OF_FAST.num_layers + 1) * SHAPE_OF_FAST.d_model
BLOCKS = count_parameters(SHAPE_OF_FAST) - 2 * TABLE - VECTORS
WHOLE, PART = BLOCKS + 2 * TABLE + VECTORS, BLOCKS // 2 + TABLE + VECTORS
"""Elements of the model that ranks record, and of the parts that one of two keeps."""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {**PLAIN, "parallel": Parallel.DDP_FLAT},
            {"parameters": 4 * WHOLE, "gradients": 4 * WHOLE},
        ),
        (
            {**PLAIN, "parallel": Parallel.FSDP, "precision": Precision.FP32},
            # the blocks are gathered for forward and for backward
            {
                "parameters": 4 * PART,
                "gradients": 4 * PART,
                "gathered parameters": 4 * 2 * (BLOCKS + TABLE),
            },
        ),
        (
            {"parallel": Parallel.FSDP},
            {
                "parameters": 4 * (PART - TABLE // 2 + PADDED // 2),
                "autocast copies": 2 * (BLOCKS + TABLE + PADDED) // 2,
                "gathered parameters": 2 * (2 * BLOCKS + TABLE + PADDED),
                "gradients": 2 * (BLOCKS + TABLE + PADDED) // 2 + 4 * VECTORS,
            },
        ),
        (
            {"parallel": Parallel.DDP_OVERLAP, "shard_optimizer": True},
            {
                "parameters": 4 * PART,
                "autocast copies": 2 * (BLOCKS + TABLE + PADDED),
                "gradients": 2 * (BLOCKS + TABLE + PADDED) + 4 * VECTORS,
            },
        ),
    ],
    ids=["ddp", "fsdp", "fast fsdp", "fast sharded optimizer"],
)
def test_the_recorder_of_memory_sees_what_a_rank_keeps_and_what_is_gathered(
    two, tmp_path, settings, expected
):
    for result in two.call("tests.parallel.checks:recorded", settings, str(tmp_path)):
        state = result.pop("optimizer state")
        assert state == pytest.approx(
            8 * WHOLE if expected["parameters"] == 4 * WHOLE else 8 * PART, rel=0.04
        )
        assert {kind: result.get(kind, 0) for kind in expected} == expected
