"""What fused kernels move: closed forms of known kernels, and the bytes of torch.compile's."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from cs336.config import (
    SIZES,
    Attention,
    CompileMode,
    Device,
    OptimizerKind,
    Phase,
    Precision,
    RunConfig,
)
from cs336.costs.compiled import compiled_tape
from cs336.costs.fusion import fused, moved_elements
from cs336.costs.layout import Layout
from cs336.costs.layout_memory import Rank
from cs336.costs.rank_operations import rank_operations
from cs336.costs.tape import Operation, OperationKey, OperationKind, phases_of

TOKENS, WIDTH = 4096, 1024
STREAM = TOKENS * WIDTH
PHASES = Phase.FORWARD, Phase.BACKWARD


def config_of(**changes: object) -> RunConfig:
    model = replace(SIZES["small"], attention=Attention.SDPA, context_length=512)
    config = RunConfig(
        size="",
        model=model,
        device=Device.CUDA,
        precision=Precision.BF16,
        optimizer=OptimizerKind.FUSED,
    )
    return replace(config, **changes)


def pass_bytes(operations: list[Operation]) -> int:
    passes = [one for one in operations if one.kind is OperationKind.PASS]
    return sum(one.launches * one.moved_bytes for one in passes)


@pytest.mark.parametrize(
    ("run", "multiplied", "expected"),
    [
        # squares, their means, the stream times their roots, times the weight
        (
            [(STREAM, STREAM), (STREAM, TOKENS), (STREAM, TOKENS, STREAM), (STREAM, WIDTH, STREAM)],
            0,
            2 * STREAM + WIDTH,
        ),
        # SwiGLU of both halves of one matmul's result
        ([(STREAM, STREAM), (STREAM, STREAM, STREAM)], 2 * STREAM, 3 * STREAM),
        # a sum with the stream that an attention block has made
        ([(STREAM, STREAM, STREAM)], STREAM, 3 * STREAM),
        # a chain of any length
        ([(STREAM, STREAM)] * 9, STREAM, 2 * STREAM),
    ],
    ids=["norm", "swiglu", "sum", "chain"],
)
def test_kernels_that_are_known_move_what_they_must(
    run: list[tuple[int, ...]], multiplied: int, expected: int
) -> None:
    assert moved_elements(run, multiplied) == expected


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Rank:
    """A rank with all eight experts of each block, of which a token chooses two."""
    path = tmp_path_factory.mktemp("mixtral") / "config.json"
    settings = {
        "model_type": "mixtral",
        "vocab_size": 320,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    path.write_text(json.dumps(settings))
    return Rank(config=config_of(model_factory=f"hf:{path}"), layout=Layout())


def between_experts(keys: list[OperationKey]) -> list[OperationKey]:
    """The passes between two matmuls of experts that follow each other in forward."""
    places = [place for place, key in enumerate(keys) if key[1] == "experts"]
    return keys[places[0] + 1 : places[1]]


def test_tokens_pass_their_experts_once(mixtral: Rank) -> None:
    """SwiGLU of two experts a token reads two hidden layers and writes one, in bf16. The kernel
    before has to write each token once for each of its experts, and the one behind to read them and
    to write their sum.
    """
    pytest.importorskip("transformers")
    tokens, width, hidden, chosen = 512, 128, 192, 2
    keys = fused(mixtral.steps[0].launches[Phase.FORWARD].block, mixtral.names)
    (swiglu,) = rank_operations(between_experts(keys), mixtral.names, 1, 1)
    assert swiglu.moved_bytes == 2 * 3 * tokens * chosen * hidden
    experts = [place for place, key in enumerate(keys) if key[1] == "experts"]
    for place, least in (
        (experts[0] - 1, tokens * chosen * width),
        (experts[1] + 1, tokens * (chosen + 1) * width),
    ):
        (one,) = rank_operations([keys[place]], mixtral.names, 1, 1)
        assert 2 * least <= one.moved_bytes <= 2 * 3 * least


@pytest.mark.parametrize("model", ["own", "mixtral"])
def test_fused_passes_move_less_between_the_same_matmuls(model: str, mixtral: Rank) -> None:
    rank = mixtral if model == "mixtral" else Rank(config=config_of(), layout=Layout())
    for phase in PHASES:
        keys = rank.steps[0].launches[phase].block
        as_one = fused(keys, rank.names)
        eager, together = (rank_operations(ones, rank.names, 1, 1) for ones in (keys, as_one))
        assert 0 < pass_bytes(together) < pass_bytes(eager)
        matmuls = [[one.sides for one in ones if one.is_matmul] for ones in (eager, together)]
        assert matmuls[0] == matmuls[1]
        assert fused(as_one, rank.names) == as_one
        makes = [make for _, make, *_ in as_one]
        assert ("passes", "passes") not in pairwise(makes)


@pytest.mark.long
def test_fused_passes_move_no_more_than_those_that_pytorch_has_compiled() -> None:
    """Whose casts of weights, and of their gradients, move 6 bytes of each element; in forward they
    are nearly as few, in backward they keep gradients of the residual stream in fp32.
    """
    steps = []
    for layers in (2, 3):
        config = config_of(compile=CompileMode.DEFAULT, batch_size=4)
        config = replace(config, model=replace(config.model, num_layers=layers))
        tape = compiled_tape(config)
        ranges = {phase: launches for phase, _, launches in phases_of(tape, -1)}
        moved = {}
        for phase in PHASES:
            first, stop = ranges[phase]
            moved[phase] = pass_bytes([tape.operations[one] for one in tape.launches[first:stop]])
        steps.append(moved)
    rank = Rank(config=config_of(), layout=Layout(micro_batch=4))
    casts_bytes = 6 * rank.linear_elements((0,))
    for phase, share in ((Phase.FORWARD, 0.9), (Phase.BACKWARD, 0.5)):
        compiled_bytes = steps[1][phase] - steps[0][phase] - casts_bytes
        keys = fused(rank.steps[0].launches[phase].block, rank.names)
        moved_bytes = pass_bytes(rank_operations(keys, rank.names, 1, 1))
        assert share * compiled_bytes < moved_bytes <= compiled_bytes, phase
