"""Models that this project did not write: what they return, the loss they compute, the tokens
they know.
"""

import contextlib
import inspect
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.functional import cross_entropy

from cs336.cli import main
from cs336.config import SIZES, LossKind, Mode, RunConfig
from cs336.measure.clock import HostClock
from cs336.measure.step import TrainingStep
from cs336.model.trainable import checkpoint_each_block
from cs336.model.user_code import check_logits, own_loss, told, vocabulary_of

KNOWN, PADDED = 37, 40
TOKENS = torch.zeros(2, 8, dtype=torch.int64)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(KNOWN, 16), nn.Linear(16, PADDED)

    def logits(self, tokens):
        return self.head(self.embedding(tokens))


class Plain(Base):
    def forward(self, tokens):
        return self.logits(tokens)


class InTuple(Base):
    def forward(self, tokens):
        return self.logits(tokens), None


class InDict(Base):
    def forward(self, tokens):
        return {"loss": None, "logits": self.logits(tokens)}


class NanoGPT(Base):
    """Without targets, the logits of the last position alone."""

    def forward(self, idx, targets=None):
        logits = self.logits(idx)
        if targets is None:
            return logits[:, [-1]], None
        return logits, cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class HuggingFace(Base):
    """Shifts the labels itself, so that its last position predicts nothing."""

    def forward(self, input_ids, labels=None):
        logits = self.logits(input_ids)
        loss = (
            None
            if labels is None
            else cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        )
        return SimpleNamespace(loss=loss, logits=logits)


def config_of(**settings):
    return RunConfig(
        size="own", model=SIZES["tiny"], model_factory="mine:make", batch_size=2, **settings
    )


@pytest.mark.parametrize("kind", [Plain, InTuple, InDict, HuggingFace])
def test_the_loss_is_cross_entropy_of_the_logits_over_the_tokens_that_the_model_knows(kind):
    step = TrainingStep(config_of(mode=Mode.FORWARD_BACKWARD), kind())
    assert step.config.model.vocab_size == KNOWN
    tokens, targets = step.batches()
    assert tokens.max() < KNOWN
    expected = cross_entropy(
        kind().logits(tokens)[..., :KNOWN].double().flatten(0, 1), targets.flatten()
    )
    assert step.forward((tokens, targets)).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("kind", [NanoGPT, HuggingFace])
def test_the_model_computes_its_own_loss(kind):
    step = TrainingStep(config_of(mode=Mode.FORWARD_BACKWARD, loss=LossKind.MODEL), kind())
    tokens, targets = step.batches()
    logits, wanted = kind().logits(tokens).double(), targets
    if kind is HuggingFace:
        logits, wanted = logits[:, :-1], tokens[:, 1:]
    expected = cross_entropy(logits.flatten(0, 1), wanted.flatten())
    assert step.forward((tokens, targets)).item() == pytest.approx(expected.item(), rel=1e-6)


def test_tokens_beyond_the_embedding_are_refused_and_fewer_are_taken():
    with pytest.raises(ValueError, match=f"{KNOWN + 1}.*{KNOWN}"):
        vocabulary_of(Plain(), TOKENS, contextlib.nullcontext(), KNOWN + 1)
    assert vocabulary_of(Plain(), TOKENS, contextlib.nullcontext(), 5) == 5


class Failing(Base):
    """Raises an exception at a place: before, between and after its operations, or within one on
    what they made.
    """

    def __init__(self, place, error):
        super().__init__()
        self.place, self.error = place, error

    def forward(self, tokens):
        self.fail(0)
        length = tokens.shape[1]
        self.fail(1)
        x = self.embedding(tokens) * length
        self.fail(2)
        x = self.head(x)
        self.fail(3)
        return x

    def fail(self, place):
        if place == self.place:
            raise self.error


class Misled(Base):
    """Gives the tokens themselves to an operation that does not take them."""

    def __init__(self, operation):
        super().__init__()
        self.operation = operation

    def forward(self, tokens):
        return self.operation(tokens)


ERRORS = [
    ValueError,
    TypeError,
    RuntimeError,
    KeyError,
    IndexError,
    AttributeError,
    AssertionError,
    ZeroDivisionError,
]


@pytest.mark.parametrize("seed", range(24))
def test_an_exception_is_told_as_what_it_is(seed):
    draw = random.Random(seed)
    kind, text = draw.choice(ERRORS), f"because of {draw.random()}"
    with pytest.raises(kind, match=text) as raised:
        vocabulary_of(
            Failing(draw.randrange(4), kind(text)), TOKENS, contextlib.nullcontext(), None
        )
    line = inspect.getsourcelines(Failing.fail)[1] + 2
    assert told(raised.value) == f"{kind.__name__}: {raised.value} (test_user_code.py, line {line})"


@pytest.mark.parametrize(
    "operation",
    [
        nn.Linear(8, 4),
        nn.Conv1d(2, 4, 3),
        nn.Conv2d(3, 4, 3),
        lambda x: x @ torch.zeros(8, 4),
        lambda x: x.softmax(-1),
        lambda x: F.layer_norm(x, (8,)),
        lambda x: F.linear(input=x, weight=torch.zeros(4, 8)),
    ],
)
def test_tokens_are_to_blame_where_an_operation_does_not_take_them(operation):
    with pytest.raises(
        ValueError,
        match=r"int64 tokens of shape \(2, 8\).*\w+Error: .* \(test_user_code.py, line \d+\)",
    ):
        vocabulary_of(Misled(operation), TOKENS, contextlib.nullcontext(), None)


def test_a_loss_is_no_logits_and_what_is_called_otherwise_takes_no_tokens():
    with pytest.raises(ValueError, match=r"shape \(\);.*--loss model"):
        vocabulary_of(Misled(lambda tokens: tokens.sum()), TOKENS, contextlib.nullcontext(), None)
    with pytest.raises(ValueError, match=r"int64 tokens of shape \(2, 8\).*labels"):
        vocabulary_of(NeedsLabels(), TOKENS, contextlib.nullcontext(), None)


class NeedsLabels(Base):
    def forward(self, tokens, labels):
        return self.logits(tokens)


@pytest.mark.parametrize("name", ["Mistral", "Gemma2", "GptOss"])
def test_blocks_under_a_checkpoint_are_called_without_the_cache(name):
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, f"{name}ForCausalLM")
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    config = kind.config_class(
        **sizes, vocab_size=KNOWN, intermediate_size=16, head_dim=8, use_cache=True
    )
    plain, saving = kind(config), kind(config)
    saving.load_state_dict(plain.state_dict())
    checkpoint_each_block(saving)
    for model in (plain, saving):
        model(TOKENS).logits.logsumexp(-1).sum().backward()
    for one, other in zip(plain.parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_what_cannot_be_used_is_refused_with_what_came():
    with pytest.raises(ValueError, match=r"\(2, 1, 40\).*--loss model"):
        check_logits(NanoGPT()(TOKENS), TOKENS, KNOWN)
    with pytest.raises(ValueError, match="str"):
        check_logits("logits", TOKENS, KNOWN)
    with pytest.raises(ValueError, match=r"targets or labels.*tokens"):
        own_loss(Plain())


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Qwen3", "Mixtral"])
@pytest.mark.parametrize("loss", LossKind)
def test_models_of_transformers_are_timed_as_they_are(name, loss):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": KNOWN,
    }
    if name != "GPT2":  # whose configuration has other names for the same sizes
        sizes |= {"intermediate_size": 32, "num_key_value_heads": 1, "head_dim": 8}
    kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**sizes))
    step = TrainingStep(config_of(loss=loss), model)
    model.eval()  # without dropout
    tokens, targets = step.batches()
    expected = model(tokens, labels=tokens).loss if loss is LossKind.MODEL else None
    if expected is None:
        expected = cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
    assert step.forward((tokens, targets)).item() == pytest.approx(expected.item(), rel=1e-5)
    _, first = step(HostClock())
    _, last = step(HostClock())
    assert last < first, "the optimizer lowers the loss of the one batch"


def of_one_shape():
    return Plain()


def test_a_sweep_measures_a_model_of_one_shape_once(capsys):
    assert (
        main(
            [
                "sweep",
                "--model",
                f"{__name__}:of_one_shape",
                "--context-lengths",
                "8",
                "--precisions",
                "fp32",
                "bf16",
                "--device",
                "cpu",
                "--dry-run",
            ]
        )
        == 0
    )
    runs = [
        line.split("_")[4]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("own_")
    ]
    assert runs == ["fp32", "bf16"]


class Convolving(nn.Module):
    """A model of dense convolutions, of which a tape knows no FLOPs."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layer = nn.Conv1d(32, 32, 3, padding=1)
        self.head = nn.Linear(32, 64)

    def forward(self, tokens):
        return self.head(self.layer(self.embedding(tokens).transpose(1, 2)).transpose(1, 2))


class Recurring(nn.Module):
    """A model of PyTorch's recurrent layers, whose kernels are cuDNN's."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layer = nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, 64)

    def forward(self, tokens):
        return self.head(self.layer(self.embedding(tokens))[0])


class Pooling(Convolving):
    """A model that returns a vector for each sequence, of another width than any vocabulary."""

    def forward(self, tokens):
        return self.embedding(tokens).mean(1)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("Convolving", "the model computes convolutions, whose time is not known"),
        ("Recurring", "layer: cuDNN computes nn.GRU by kernels of its own"),
    ],
)
def test_what_no_kernel_of_the_ceilings_tells_has_no_time(model, reason, capsys):
    """Neither has a layout in a plan."""
    words = ["--model", f"tests.model.test_user_code:{model}", "--context-length", "16"]
    assert main(["account", *words, "--device-name", "H100"]) == 0
    said = capsys.readouterr().out
    assert "A step takes" not in said
    assert f"The time is not foretold: {reason}" in said
    assert main(["plan", *words, "--gpus", "8xH100"]) == 2
    assert "no plan: " in capsys.readouterr().err


def test_logits_without_an_axis_of_tokens_are_told_by_their_shape(capsys):
    """And not by the vocabulary that their last axis would be."""
    words = ["--model", "tests.model.test_user_code:Pooling", "--vocab-size", "64"]
    assert main(["account", *words, "--context-length", "16", "--device-name", "H100"]) == 2
    assert "it returned logits of shape (4, 32)" in capsys.readouterr().err
