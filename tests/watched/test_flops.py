"""FLOPs of a watched loop's model: beside PyTorch's own counter on real data, and closed forms."""

import random
import subprocess
import sys
import warnings
from functools import lru_cache, partial

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from cs336 import watch

VOCABULARY, WIDTH, HEADS = 50, 32, 4


class Attention(nn.Module):
    """Causal attention with fewer heads of keys than of queries."""

    def __init__(self, key_heads):
        super().__init__()
        self.key_heads, self.d_head = key_heads, WIDTH // HEADS
        self.query = nn.Linear(WIDTH, WIDTH)
        self.keys = nn.Linear(WIDTH, 2 * key_heads * self.d_head)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, HEADS, self.d_head).transpose(1, 2)
        pairs = self.keys(x).view(batch, length, 2, self.key_heads, self.d_head)
        keys, values = pairs.unbind(2)
        mixed = scaled_dot_product_attention(
            query, keys.transpose(1, 2), values.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class Experts(nn.Module):
    """Each token goes to one expert, which depends on its values."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        if self.gate(x).sum() > 1e9:
            return x
        return self.experts[0](x)


class Language(nn.Module):
    """Embedding, layers and a head that may share the embedding's table."""

    def __init__(self, *layers, ties=False, checkpoints=False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.checkpoints = checkpoints
        if ties:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x))
        return self.head(x)


class Low(nn.Module):
    """A frozen layer with a trained part of low rank beside it."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


class Positions(nn.Module):
    """Makes positions without naming a device, and leaves a tensor in its class."""

    last = None

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        Positions.last = x + self.table(torch.arange(x.shape[1]))
        return self.layer(Positions.last)


class WithLoss(nn.Module):
    """Returns logits and a loss, which does not use all of them."""

    def __init__(self):
        super().__init__()
        self.layer, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 7)

    def forward(self, x):
        return self.unused(x), self.layer(x).sum()


def map_once(function, x):
    return function(x)


class Closures(nn.Module):
    """Computes with functions that refer to its layers, as minGPT does, in all ways that a function
    can.
    """

    def __init__(self, way):
        super().__init__()
        self.layers = nn.ModuleDict({"up": nn.Linear(WIDTH, 64), "down": nn.Linear(64, WIDTH)})
        self.calls = 0
        layers = self.layers
        with_default = lambda x, layers=layers: layers.down(layers.up(x))  # noqa: E731
        scale = torch.ones(WIDTH)
        kept_layers = lru_cache(maxsize=None)(lambda: layers)

        def counted(x):
            nonlocal scale
            scale = scale * 1.0
            self.calls += 1
            return layers.down(layers.up(x)) * scale

        self.function = {
            "variable": lambda x: layers.down(layers.up(x)),
            "default": with_default,
            "keyword": partial(lambda x, *, up: layers.down(up(x)), up=layers.up),
            "within": partial(map_once, with_default),
            "method": self._computed,
            "cached": lambda x: kept_layers().down(kept_layers().up(x)),
            "assigned": counted,
            "itself": self.twice(2),
        }[way]
        self.functions = [self.function]
        self.by_name = {"a": {"b": (self.function,)}}

    def _computed(self, x):
        return self.layers.down(self.layers.up(x))

    def twice(self, depth):
        layers = self.layers

        def inner(x, depth=depth):
            x = layers.down(layers.up(x))
            return x if depth == 1 else inner(x, depth - 1)

        return inner

    def forward(self, x):
        x = self.function(x)
        (function,) = self.functions
        return function(x) + self.by_name["a"]["b"][0](x)


CLOSURES = ("variable", "default", "keyword", "within", "method", "cached", "assigned", "itself")
GLOBAL = nn.Sequential(nn.Linear(WIDTH, WIDTH))
GLOBAL.function = lambda x: GLOBAL[0](x)


class Tables(nn.Module):
    """Keeps tensors of positions in a dictionary, which is no buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.tables = {"a": [torch.ones(WIDTH)]}

    def forward(self, x):
        return self.layer(x * self.tables["a"][0])


class Wrapping(nn.Module):
    """Has a part with the name that wrappers give to what they wrap."""

    def __init__(self):
        super().__init__()
        self.module, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.module(x))


class Caller:
    """Refers to a module, which nobody can know."""

    def __init__(self, module):
        self.module = module

    def __deepcopy__(self, memo):
        return self

    def __call__(self, x):
        return self.module.forward(x)


def old_weight_norm(layer):
    """A layer whose weight a hook computes from its length and direction."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))


def encoder():
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True)


TOKENS = torch.arange(2 * 16).view(2, 16) % VOCABULARY
IMAGES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)
MODELS = {
    "attention": (lambda: Language(Attention(HEADS), mlp()), TOKENS),
    "grouped queries": (lambda: Language(Attention(2), mlp()), TOKENS),
    "one head of keys": (lambda: Language(Attention(1)), TOKENS),
    "tied": (lambda: Language(mlp(), ties=True), TOKENS),
    "encoder": (lambda: Language(encoder()), TOKENS),
    "low rank": (lambda: Language(Low(), Low()), TOKENS),
    "recurrent": (lambda: Language(Recurrent()), TOKENS),
    "positions": (lambda: Language(Positions()), TOKENS),
    "weight norm": (lambda: Language(old_weight_norm(nn.Linear(WIDTH, WIDTH))), TOKENS),
    "only layers": (lambda: mlp(), torch.ones(4, WIDTH)),
    "one sequence": (
        lambda: Language(nn.Sequential(nn.RMSNorm(WIDTH), mlp(), nn.Dropout(0.5))),
        TOKENS[:1],
    ),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2)),
        IMAGES,
    ),
    "depthwise": (lambda: nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.Flatten()), IMAGES),
    "tables": (lambda: Language(Tables()), TOKENS),
    **{way: (lambda way=way: Language(Closures(way)), TOKENS) for way in CLOSURES},
    "one dimension": (lambda: nn.Conv1d(3, 5, 3), IMAGES[:, :, 0]),
}


def watched_steps(model, inputs, tmp_path, steps=2):
    """Steps of a watched loop: its record, and the losses."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.0)
    losses = []
    with torch.random.fork_rng():
        watched = watch(model, optimizer, warmup_steps=0, output=tmp_path, every=0)
        for _ in range(steps):
            with watched.step():
                loss = model(inputs).sum()
                loss.backward()
                optimizer.step()
            losses.append(loss.item())
        record = watched.record()
        watched.remove()
    return record, losses


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_that_pytorch_counts_on_real_data(name, tmp_path):
    """With attention as matmuls and without fused recurrent layers, which it does not count."""
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make()
    record, _ = watched_steps(model, inputs, tmp_path)
    assert record.seen.not_traced == ""
    with (
        sdpa_kernel(SDPBackend.MATH),
        torch.backends.mkldnn.flags(enabled=False),
        FlopCounterMode(display=False) as counter,
    ):
        model(inputs).sum().backward()
    assert record.seen.flops.per_step == pytest.approx(counter.get_total_flops(), rel=1e-12)


def test_what_a_checkpoint_computes_again_is_apart(tmp_path):
    plain, _ = watched_steps(Language(mlp(), mlp()), TOKENS, tmp_path)
    again, _ = watched_steps(Language(mlp(), mlp(), checkpoints=True), TOKENS, tmp_path)
    assert again.seen.flops.per_step == plain.seen.flops.per_step
    # the last matmul of a layer saves nothing for backward, which stops before it
    a_layer = 2 * TOKENS.numel() * WIDTH * 64
    assert again.seen.flops.recomputed_per_step == 2 * a_layer
    assert plain.seen.flops.recomputed_per_step == 0


def test_frozen_layers_have_no_gradient_of_their_weights(tmp_path):
    record, _ = watched_steps(Language(Low()), TOKENS, tmp_path)
    tokens = TOKENS.numel()
    frozen, low, head = WIDTH * WIDTH, 2 * 2 * WIDTH, WIDTH * VOCABULARY
    assert record.seen.flops.per_step == 2 * tokens * (2 * frozen + 3 * low + 3 * head)


def test_tracing_changes_nothing_of_the_loop(tmp_path):
    """A report between steps draws no random number, and leaves no hook and no tensor behind."""
    losses = {}
    for reports in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Dropout(0.5), mlp())
        calls = []
        model[2].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watched = watch(model, optimizer, warmup_steps=0, output=tmp_path, every=0)
        losses[reports] = []
        for _ in range(3):
            with watched.step():
                loss = model(TOKENS).square().sum() * random.random()
                loss.backward()
                optimizer.step()
            losses[reports].append(loss.item())
            if reports:
                assert watched.record().seen.flops is not None
        assert len(calls) == 3
        assert all(not parameter.is_meta for parameter in model.parameters())
        watched.remove()
    assert losses[True] == losses[False]


def test_what_depends_on_values_is_not_traced_and_says_why(tmp_path):
    record, losses = watched_steps(Language(Experts()), TOKENS, tmp_path)
    assert record.seen.flops is None
    assert "needs the values" in record.seen.not_traced
    assert len(losses) == 2


SLOW_TO_IMPORT = """
import sys, time
import torch
from torch import nn
from cs336 import watch
from cs336.watched import flops


class Slow:
    def find_spec(name, path, target=None):
        if name == "torch._dynamo":
            time.sleep(5)


sys.meta_path.insert(0, Slow)
flops.LIMIT_S = 4
model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10))
watched = watch(model, warmup_steps=0)
with watched.step():
    model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
watched.remove()
assert "torch._dynamo" not in sys.modules
print(watched.record().seen.flops.per_step)
"""
"""A loop without an optimizer of PyTorch, which would import what a trace needs."""


def test_the_time_of_imports_is_not_that_of_tracing(tmp_path):
    """Both gradients of the linear layer and its forward are of 2 * 6 * 8 * 10 FLOPs."""
    command = [sys.executable, "-c", SLOW_TO_IMPORT]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == str(3 * 2.0 * 6 * 8 * 10)


class Neighbours(nn.Module):
    """Sums what neighbours in a graph have, as LightGCN does, before drawn layers."""

    def __init__(self, *layers):
        super().__init__()
        self.table, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.Sequential(*layers)

    def forward(self, edges):
        source, target = edges
        summed = torch.zeros_like(self.table.weight)
        return self.layers(summed.index_add(0, target, self.table.weight[source]))


@pytest.mark.parametrize("seed", range(4))
def test_a_model_without_matmuls_is_not_said_to_compute_nothing(seed, tmp_path):
    """PyTorch's counter sees 0 FLOPs of drawn layers unless a linear one is among them."""
    draw = random.Random(seed)
    kinds = draw.choices([partial(nn.LayerNorm, WIDTH), nn.ReLU, nn.Softplus], k=3)
    if seed % 2:
        kinds.insert(draw.randrange(4), partial(nn.Linear, WIDTH, WIDTH))
    model = Neighbours(*[kind() for kind in kinds])
    edges = torch.randint(VOCABULARY, (2, 200))
    with FlopCounterMode(display=False) as counter:
        model(edges).sum().backward()
    record, _ = watched_steps(model, edges, tmp_path)
    if counter.get_total_flops():
        assert record.seen.flops.per_step == counter.get_total_flops()
    else:
        assert record.seen.flops is None
        assert record.seen.not_traced


def test_calls_of_several_shapes_are_summed(tmp_path):
    model = nn.Linear(WIDTH, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = watch(model, optimizer, warmup_steps=0, output=tmp_path, every=0)
    rows = [3, 5, 8, 3]
    for count in rows:
        with watched.step():
            model(torch.ones(count, WIDTH)).sum().backward()
            optimizer.step()
    # forward and the gradient of the weights: the input has none
    assert watched.record().seen.flops.per_step == 2 * 2 * WIDTH * sum(rows) / len(rows)
    watched.remove()


def replaced_forward(layer):
    """A layer whose forward is a function that calls the usual one."""
    usual = layer.forward
    layer.forward = lambda x: usual(x)
    return layer


@pytest.mark.parametrize("way", ["forward", *CLOSURES])
def test_functions_that_refer_to_the_model_compute_with_its_copy(way, tmp_path):
    """The gradients are those of the loop alone, as are variables that the functions assign."""
    results = []
    for is_watched in (False, True):
        torch.manual_seed(0)
        model = replaced_forward(nn.Linear(WIDTH, WIDTH)) if way == "forward" else Closures(way)
        inputs = torch.ones(3, WIDTH)
        if is_watched:
            record, _ = watched_steps(model, inputs, tmp_path)
            assert record.seen.flops is not None
        else:
            for _ in range(2):
                model(inputs).sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        results.append((gradients, getattr(model, "calls", 0)))
    (alone, calls_alone), (watched, calls_watched) = results
    assert all(map(torch.equal, alone, watched))
    assert calls_alone == calls_watched


def test_a_function_that_refers_to_the_model_by_a_global_name_is_traced(tmp_path):
    model = nn.Sequential(GLOBAL)
    GLOBAL.forward = GLOBAL.function
    record, _ = watched_steps(model, torch.ones(3, WIDTH), tmp_path)
    assert record.seen.flops.per_step == 2 * 2 * 3 * WIDTH * WIDTH
    assert GLOBAL.function.__globals__["GLOBAL"] is GLOBAL


def test_what_is_not_copied_is_not_called_with_the_parameters(tmp_path):
    model = nn.Sequential(nn.Linear(WIDTH, 1))
    model.forward = Caller(model[0])
    record, _ = watched_steps(model, torch.ones(3, WIDTH), tmp_path)
    assert record.seen.flops is None
    assert "themselves" in record.seen.not_traced
    assert torch.equal(model[0].weight.grad, torch.full((1, WIDTH), 6.0))  # of two steps


def compiled(module):
    return torch.compile(module, backend="eager")


def compiled_in_place(module):
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize("compile_it", [compiled, compiled_in_place])
@pytest.mark.parametrize("part", ["before", "after", "a layer", "a function"])
def test_compiled_models_have_the_flops_that_they_have_as_they_are_written(
    part, compile_it, tmp_path
):
    torch._dynamo.reset()
    model = Wrapping()
    if part == "a layer":
        model.module = compile_it(model.module)
    elif part == "a function":
        model.forward = torch.compile(model.forward, backend="eager")
    called = model = compile_it(model) if part == "before" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = watch(model, optimizer, warmup_steps=0, output=tmp_path, every=0)
    if part == "after":
        called = compile_it(model)
    inputs = torch.ones(5, WIDTH)
    for _ in range(2):
        with watched.step():
            called(inputs).sum().backward()
    frames = torch._dynamo.utils.counters["frames"].copy()
    seen = watched.record().seen
    watched.remove()
    assert torch._dynamo.utils.counters["frames"] == frames
    # the input has no gradient
    assert seen.flops.per_step == 2 * 5 * (2 * WIDTH * WIDTH + 3 * WIDTH * 3)


def test_backward_begins_at_the_loss_that_the_model_returns(tmp_path):
    model = WithLoss()
    watched = watch(model, warmup_steps=0, output=tmp_path, every=0)
    with watched.step():
        model(torch.ones(3, WIDTH))[1].backward()
    forward = 2 * 3 * WIDTH * (WIDTH + 7)
    assert watched.record().seen.flops.per_step == forward + 2 * 3 * WIDTH * WIDTH
    watched.remove()


def test_classes_are_left_as_they_were(tmp_path):
    record, _ = watched_steps(Language(Positions()), TOKENS, tmp_path)
    assert record.seen.flops is not None
    assert not Positions.last.is_meta
