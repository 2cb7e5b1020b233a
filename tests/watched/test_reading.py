"""What is said of tokens, lengths, padding and precision, against what the loop was given."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from cs336 import watch
from cs336.analysis.loop_times import loop_sentences
from cs336.config import Phase, Precision
from cs336.record import WarningCode

VOCABULARY, WIDTH = 11, 8


class Model(nn.Module):
    """An embedding and a block; `mixer` may know the order of the axes."""

    def __init__(self, mixer=None, positions=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(64, WIDTH) if positions else None
        self.mixer = mixer
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        hidden = self.embedding(ids)
        if self.positions is not None:
            hidden = hidden + self.positions(torch.arange(ids.shape[1]))
        if self.mixer is not None:
            hidden = self.mixer(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Named(Model):
    def forward(self, labels=None, attention_mask=None, input_ids=None):
        return super().forward(input_ids)


class FromBatch(Named):
    def forward(self, batch):
        return super().forward(**batch)


def record_of(model, batches, call=None, **options):
    """Train on each batch in a step of its own."""
    watched = watch(model, warmup_steps=0, **options)
    for batch in batches:
        with watched.step():
            (call or model)(batch).sum().backward()
    watched.remove()
    return watched.record()


def ids(*shape):
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % VOCABULARY


@pytest.mark.parametrize("first", [True, False])
def test_the_order_of_the_axes_is_that_of_the_model(first, tmp_path):
    """Of ids (3, 5) a model of PyTorch's says which axis is the sequence."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=first)
    record = record_of(Model(layer), [ids(3, 5)] * 2, output=tmp_path)
    expected = (3, 5) if first else (5, 3)
    assert (record.loop.batch_size, record.loop.context_length) == expected
    assert record.seen.tokens == (15, 15)


def test_the_order_is_known_from_positions_or_the_loader_or_not_claimed(tmp_path):
    known = record_of(Model(positions=True), [ids(3, 5)], output=tmp_path)
    assert (known.loop.batch_size, known.loop.context_length) == (3, 5)
    unknown = record_of(Model(), [ids(3, 5)], output=tmp_path)
    assert (unknown.seen.tokens, unknown.loop.context_length) == ((15,), None)
    # a batch of the loader is 4 sequences, whichever axis they lie along
    for batch, length in ((ids(12, 7), 7), (ids(12, 4), None)):
        loader = DataLoader(batch, batch_size=4)
        seen = record_of(Model(), loader, output=tmp_path)
        assert seen.loop.context_length == length


def test_classes_that_an_embedding_is_given_are_no_positions(tmp_path):
    class Conditional(Model):
        def __init__(self):
            super().__init__()
            self.class_embedding = nn.Embedding(8, WIDTH)

        def forward(self, batch):
            return super().forward(batch) + self.class_embedding(torch.tensor([2, 2, 1])).sum()

    record = record_of(Conditional(), [ids(3, 5)] * 3, output=tmp_path)
    assert (record.seen.tokens, record.loop.context_length) == ((15,) * 3, None)


@pytest.mark.parametrize("kind", [Named, FromBatch])
def test_tokens_by_name_with_padding_and_unequal_lengths(kind, tmp_path):
    """Labels come first in the batch, and are fewer."""
    batches = []
    for length, padding in ((5, 2), (9, 0), (7, 4)):
        mask = torch.ones(3, length, dtype=torch.int64)
        mask[1, length - padding :] = 0
        labels = torch.zeros(3, dtype=torch.int64)
        batches.append({"labels": labels, "attention_mask": mask, "input_ids": ids(3, length)})
    model = kind()
    call = model if kind is FromBatch else lambda batch: model(**batch)
    record = record_of(model, batches, call, output=tmp_path)
    assert record.seen.tokens == (15, 27, 21)
    assert record.seen.context_lengths == (5, 9)
    assert (record.seen.padding_tokens, record.seen.masked_tokens) == (6, 63)
    assert record.loop.context_length is None, "the lengths differ"
    lengths, padding, _ = loop_sentences(record)
    assert re.findall(r"\d+", lengths) == ["5", "9", "15", "27"]
    assert re.findall(r"[\d.]+", padding)[0] == f"{100 * 6 / 63:.3g}"


def test_an_encoder_and_a_decoder_that_share_an_embedding_are_both_counted(tmp_path):
    class Translator(Model):
        def forward(self, pair):
            return super().forward(pair[0]).sum() + super().forward(pair[1]).sum()

    record = record_of(Translator(), [(ids(3, 5), ids(3, 7))], output=tmp_path)
    assert record.seen.tokens == (36,)


@pytest.mark.parametrize("kind", ["classes", "positions", "both"])
def test_what_describes_images_or_series_is_no_token(kind, tmp_path):
    """As the classes of a diffusion model's images, and the positions of a series of vectors."""

    class Series(Model):
        def forward(self, given):
            vectors, classes = given
            hidden = self.mixer(vectors)
            if kind != "classes":
                hidden = hidden + self.positions(torch.arange(vectors.shape[1]))
            if kind != "positions":
                hidden = hidden + self.embedding(classes)[:, None]
            return hidden

    given = torch.ones(4, 6, WIDTH), ids(4) if kind != "positions" else None
    record = record_of(Series(nn.Linear(WIDTH, WIDTH), positions=True), [given], output=tmp_path)
    assert record.seen.tokens == ()


def test_one_row_of_packed_tokens_is_counted(tmp_path):
    """Also beside a floating mask."""

    class Packed(Model):
        def forward(self, given):
            return super().forward(given[0][None]) + given[1].sum()

    record = record_of(Packed(), [(ids(12), torch.ones(1, 1, 12, 12))], output=tmp_path)
    assert record.seen.tokens == (12,)


def test_passes_that_train_nothing_have_no_tokens(tmp_path):
    model = Model()
    watched = watch(model, warmup_steps=0, output=tmp_path)
    for _ in range(2):
        with watched.step():
            model.eval()
            model(ids(6, 9))  # nothing leads back to it
            with torch.no_grad():
                model.train()(ids(50, 5))
            model.eval()(ids(3, 5)).sum().backward()  # training in evaluation mode, and seen to be
    watched.remove()
    assert watched.record().seen.tokens == (15, 15)


def precision_of(model, tmp_path, context=None):
    watched = watch(model, warmup_steps=0, output=tmp_path)
    for _ in range(5):
        with watched.step(), context or torch.autocast("cpu", enabled=False):
            model(ids(3, 5)).float().sum().backward()
    watched.remove()
    return watched.record().loop.precision


def test_precision_is_that_of_the_blocks(tmp_path):
    assert precision_of(Model(), tmp_path) is Precision.FP32
    assert precision_of(Model().bfloat16(), tmp_path) is Precision.BF16
    outer = torch.autocast("cpu", torch.bfloat16)
    assert precision_of(Model(), tmp_path, outer) is Precision.BF16
    wrapped = Model()
    forward = wrapped.forward

    def forward_under_autocast(batch):
        with torch.autocast("cpu", torch.bfloat16):
            return forward(batch)

    wrapped.forward = forward_under_autocast
    assert precision_of(wrapped, tmp_path) is Precision.BF16

    class Mixed(Model):
        def forward(self, batch):
            hidden = self.embedding(batch).bfloat16()
            for block in self.blocks:
                hidden = block(hidden)
            return self.head(hidden.float())

    mixed = Mixed()
    mixed.blocks.bfloat16()
    assert next(mixed.parameters()).dtype is torch.float32
    assert precision_of(mixed, tmp_path) is Precision.BF16


def test_precision_of_a_compiled_model_is_said_only_where_it_is_known(tmp_path):
    torch._dynamo.reset()
    compiled = torch.compile(Model(), backend="eager")
    assert precision_of(compiled, tmp_path) is None, "autocast may run within"
    low = torch.compile(Model().bfloat16(), backend="eager")
    assert precision_of(low, tmp_path) is Precision.BF16


def test_a_model_without_parameters_and_an_optimizer_of_their_own(tmp_path):
    class Update:
        def step(self):
            pass

    weight = torch.ones(3, requires_grad=True)
    watched = watch(nn.Tanh(), Update(), warmup_steps=0, output=tmp_path)
    model = nn.Tanh()
    watched = watch(model, [Update()], warmup_steps=0, output=tmp_path)
    for _ in range(2):
        with watched.step():
            model(weight).sum().backward()
    record = watched.record()
    assert record.num_parameters == 0
    assert Phase.OPTIMIZER not in {each.phase for each in record.measurements}
    (said,) = [each for each in record.warnings if each.code is WarningCode.NOT_SEEN]
    assert "Update" in said.message


def sharded(model):
    if torch.__version__ < (2, 7):
        pytest.skip("this PyTorch shards only on a GPU")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def prepared(model):
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model)


WRAPPERS = {
    "ddp": nn.parallel.DistributedDataParallel,
    "fully_shard": sharded,
    "accelerate": prepared,
    "data parallel": nn.DataParallel,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_wrapped_first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_wrappers_are_seen_through(kind, is_wrapped_first, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        model = Model(positions=True)
        if is_wrapped_first:
            model = WRAPPERS[kind](model)
        watched = watch(model, warmup_steps=1, output=tmp_path)
        called = model if is_wrapped_first else WRAPPERS[kind](model)
        optimizer = torch.optim.SGD(called.parameters(), lr=0.1)
        for _ in range(3):
            with watched.step():
                logits = called(ids(3, 5))
                functional.cross_entropy(logits.flatten(0, 1), ids(15)).backward()
                optimizer.step()
                optimizer.zero_grad()
        record = watched.record()
        watched.remove()
    finally:
        dist.destroy_process_group()
    assert {Phase.FORWARD, Phase.BACKWARD} <= {each.phase for each in record.measurements}
    assert (record.seen.tokens, record.seen.context_lengths) == ((15, 15), (5, 5))
    precision = Precision.BF16 if kind == "accelerate" else Precision.FP32
    assert record.loop.precision is precision


def test_the_optimizer_in_every_third_step_has_the_time_of_these(tmp_path):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = watch(model, optimizer, warmup_steps=0, output=tmp_path)
    for number in range(9):
        with watched.step():
            model(ids(3, 5)).sum().backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    times = {each.phase: each.times_s for each in watched.record().measurements}
    watched.remove()
    assert len(times[Phase.OPTIMIZER]) == 3
    assert all(times[Phase.OPTIMIZER])
    assert len(times[Phase.BACKWARD]) == 9
