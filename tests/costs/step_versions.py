"""Versions of small training steps: sources in which lines have other spellings that change no
cost (HARMLESS), and others that do, with the module that is to be named (REGRESSIONS).
"""

import random
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

HEAD = """
import math
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn
from torch.utils.checkpoint import checkpoint
"""

LM = (
    HEAD
    + """
class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        <norm>


class Attention(nn.Module):
    def __init__(self, width, heads, length):
        super().__init__()
        self.heads = heads
        <layers_of_attention>
        self.register_buffer("mask", torch.ones(length, length, dtype=<mask_type>).tril())

    def forward(self, x):
        batch, length, width = x.shape
        <project>
        <split>
        <attend>
        <merge>
        <output>


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, <hidden>)
        self.down = nn.Linear(<hidden>, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        <feed>
        <drop>


class Block(nn.Module):
    def __init__(self, width, heads, length):
        super().__init__()
        <layers_of_block>

    def forward(self, x):
        <first>
        <second>
        return x


class Model(nn.Module):
    def __init__(self, vocabulary, width, depth, heads, length):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        <blocks>
        self.norm = Norm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        <more>

    def forward(self, tokens):
        <lookup>
        <loop>
        x = self.norm(x)
        <logits>


SEEN = []


def make(batch_size=3):
    model = Model(211, 48, 3, 4, 32).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), <optimizer>)
    total = 0

    def step():
        nonlocal total
        tokens = torch.randint(0, 211, (batch_size, 33), device="cuda")
        <loss>
        <backward>
        optimizer.step()
        <zero>
        <evaluation>
        <after>

    return step
"""
)

NAIVE = """
scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
scores = scores.masked_fill(~self.mask[:length, :length], float("-inf"))
y = scores.softmax(-1) @ v
"""
FUSED = "y = F.scaled_dot_product_attention(q, k, v, is_causal=True)"

BASE = {
    "norm": """
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return x * scale * self.weight
    """,
    "layers_of_attention": """
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
    """,
    "mask_type": "torch.bool",
    "project": "q, k, v = self.qkv(x).chunk(3, dim=-1)",
    "split": """
        q = q.view(batch, length, self.heads, -1).transpose(1, 2)
        k = k.view(batch, length, self.heads, -1).transpose(1, 2)
        v = v.view(batch, length, self.heads, -1).transpose(1, 2)
    """,
    "attend": NAIVE,
    "merge": "y = y.transpose(1, 2).reshape(batch, length, width)",
    "output": "return self.out(y)",
    "hidden": "4 * width",
    "feed": "x = self.down(F.gelu(self.up(x)))",
    "drop": "return self.drop(x)",
    "layers_of_block": """
        self.norm1 = Norm(width)
        self.attn = Attention(width, heads, length)
        self.norm2 = Norm(width)
        self.ffn = FeedForward(width)
    """,
    "first": "x = x + self.attn(self.norm1(x))",
    "second": "x = x + self.ffn(self.norm2(x))",
    "blocks": """
        self.layers = nn.ModuleList([Block(width, heads, length) for _ in range(depth)])
    """,
    "more": "",
    "lookup": "x = self.embed(tokens)",
    "loop": """
        for layer in self.layers:
            x = layer(x)
    """,
    "logits": "return self.head(x)",
    "optimizer": "fused=True",
    "loss": """
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    """,
    "backward": "loss.backward()",
    "zero": "optimizer.zero_grad()",
    "evaluation": """
        model.eval()
        with torch.no_grad():
            model(tokens[:1, :-1])
        model.train()
    """,
    "after": "return loss.detach()",
}
CHECKPOINTED = {
    "loop": """
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
    """
}

HARMLESS = {
    "norm": [
        """
        squares = x.pow(2)
        mean = torch.mean(squares, dim=-1, keepdim=True)
        del squares
        normed = x * torch.rsqrt(mean + 1e-5)
        return self.weight * normed
        """,
        """
        # the mean square of each position
        scale = (x.pow(2).mean(dim=-1, keepdim=True) + 1e-5).rsqrt()
        return torch.mul(torch.mul(x, scale), self.weight)
        """,
        """
        def scale_of(values):
            return torch.rsqrt(values.square().mean(-1, True) + 1e-5)

        return x * scale_of(x) * self.weight
        """,
    ],
    "layers_of_attention": [
        """
        self.out = nn.Linear(width, width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        """
    ],
    "project": [
        "q, k, v = F.linear(x, self.qkv.weight).chunk(3, dim=-1)",
        "q, k, v = self.qkv(x).split(width, dim=-1)",
        "q, k, v = torch.chunk(self.qkv(x), chunks=3, dim=2)",
        "q, k, v = self.qkv.forward(x).split([width] * 3, dim=-1)",
    ],
    "split": [
        "q, k, v = (rearrange(p, 'b t (h d) -> b h t d', h=self.heads) for p in (q, k, v))",
        "q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (q, k, v))",
        """
        def heads_of(p):
            return p.reshape(batch, length, self.heads, width // self.heads).permute(0, 2, 1, 3)

        v, k, q = heads_of(v), heads_of(k), heads_of(q)
        """,
        """
        shape = (batch, length, self.heads, -1)
        q, k, v = [torch.transpose(p.reshape(shape), 1, 2) for p in (q, k, v)]
        """,
    ],
    "attend": [
        """
        scale = q.shape[-1] ** -0.5
        scores = torch.matmul(q, k.mT) * scale
        hidden = ~self.mask[:length, :length]
        scores = torch.masked_fill(scores, hidden, -math.inf)
        weights = torch.softmax(scores, dim=-1)
        y = torch.matmul(weights, v)
        """,
        """
        def weights_of(scores):
            return F.softmax(scores.masked_fill(self.mask[:length, :length].logical_not(),
                                                -torch.inf), dim=-1)

        y = weights_of(q.matmul(k.transpose(2, 3)).div(math.sqrt(q.size(-1)))).matmul(v)
        """,
        """
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~self.mask[:length, :length], float("-inf"))
        y = nn.Softmax(dim=-1)(scores) @ v
        """,
    ],
    "merge": [
        "y = y.transpose(1, 2).contiguous().view(batch, length, width)",
        "y = rearrange(y, 'b h t d -> b t (h d)')",
        "y = y.permute(0, 2, 1, 3).flatten(2)",
        "y = torch.reshape(y.transpose(2, 1), (batch, length, -1))",
    ],
    "output": ["return F.linear(y, self.out.weight)", "y = self.out(y)\nreturn y"],
    "feed": [
        "h = self.up(x)\nh = F.gelu(h)\nx = self.down(h)",
        "x = F.linear(F.gelu(F.linear(x, self.up.weight, self.up.bias)), self.down.weight, "
        "self.down.bias)",
        "wide = self.up(x)\nx = self.down(nn.functional.gelu(input=wide))",
        "x = self.up(x)  # widen\nx = nn.GELU()(x)\nx = self.down(x)",
    ],
    "drop": [
        "return F.dropout(x, 0.1, self.training)",
        "x = self.drop(x)\nreturn x",
        "return torch.dropout(x, self.drop.p, train=self.training)",
    ],
    "layers_of_block": [
        """
        self.ffn = FeedForward(width)
        self.norm2 = Norm(width)
        self.attn = Attention(width, heads, length)
        self.norm1 = Norm(width)
        """
    ],
    "first": [
        "h = self.attn(self.norm1(x))\nx = x + h\ndel h",
        "x = torch.add(x, self.attn(self.norm1(x)))",
        "x = self.attn(self.norm1(x)) + x",
        "y = self.norm1(x)\ny = self.attn(y)\nx = x + y\ndel y",
    ],
    "second": ["y = self.ffn(self.norm2(x))\nx = y + x", "x = x.add(self.ffn(self.norm2(x)))"],
    "blocks": [
        """
        layers = []
        for _ in range(depth):
            layers.append(Block(width=width, heads=heads, length=length))
        self.layers = nn.ModuleList(layers)
        """,
        "self.layers = nn.Sequential(*(Block(width, heads, length) for _ in range(depth)))",
    ],
    "lookup": [
        "x = F.embedding(tokens, self.embed.weight)",
        "x = torch.embedding(self.embed.weight, tokens)",
    ],
    "loop": [
        "for number in range(len(self.layers)):\n    x = self.layers[number](x)",
        "for _, layer in enumerate(self.layers):\n    y = layer(x)\n    x = y\n    del y",
    ],
    "logits": ["return F.linear(x, self.head.weight)", "logits = self.head(x)\nreturn logits"],
    "loss": [
        """
        targets = tokens[:, 1:].reshape(-1)
        logits = model(tokens[:, :-1])
        loss = nn.CrossEntropyLoss()(logits.view(-1, logits.shape[-1]), targets)
        """,
        """
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        logits = model(inputs)
        loss = F.cross_entropy(rearrange(logits, 'b t v -> (b t) v'),
                               rearrange(targets, 'b t -> (b t)'))
        """,
    ],
    "backward": ["torch.autograd.backward(loss)", "torch.autograd.backward([loss])"],
    "zero": ["optimizer.zero_grad(set_to_none=True)", "model.zero_grad()"],
    "after": ["result = loss.detach()\nreturn result", "return loss.data"],
}
"""Other spellings of lines of LM that launch and keep the same."""

CONV = (
    HEAD
    + """
class Unit(nn.Module):
    def __init__(self, channels, wider, stride):
        super().__init__()
        self.conv = nn.Conv2d(channels, wider, 3, stride=stride, padding=1, bias=<bias>)
        self.norm = nn.BatchNorm2d(wider)

    def forward(self, x):
        <unit>


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = Unit(3, 16, 1)
        <units>
        self.head = nn.Linear(32, 10)
        self.seen = []

    def forward(self, x):
        <stem>
        <body>
        <pool>
        return self.head(x)


def make(batch_size=4):
    model = Net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    <criterion>

    def step():
        images = torch.randn(batch_size, 3, 32, 32, device="cuda")
        labels = torch.randint(0, 10, (batch_size,), device="cuda")
        optimizer.zero_grad()
        <loss>
        loss.backward()
        optimizer.step()

    return step
"""
)
CONV_BASE = {
    "bias": "False",
    "unit": "return F.relu(self.norm(self.conv(x)), inplace=True)",
    "units": "self.units = nn.ModuleList([Unit(16, 32, 2), Unit(32, 32, 1)])",
    "stem": "x = self.stem(x)",
    "body": "for unit in self.units:\n    x = unit(x)",
    "pool": "x = x.mean((2, 3))",
    "criterion": "criterion = nn.CrossEntropyLoss()",
    "loss": "loss = criterion(model(images), labels)",
}
CONV_HARMLESS = {
    "unit": [
        "x = self.conv(x)\nx = self.norm(x)\nreturn F.relu_(x)",
        "return nn.ReLU(inplace=True)(self.norm(self.conv(x)))",
        "x = F.conv2d(x, self.conv.weight, stride=self.conv.stride, padding=1)\n"
        "return torch.relu_(self.norm(x))",
        "return self.norm(self.conv(x)).relu_()",
    ],
    "units": ["self.units = nn.Sequential(Unit(16, 32, 2), Unit(32, 32, stride=1))"],
    "stem": ["x = self.stem.forward(x)", "x = self.stem(x)  # as many pixels"],
    "body": ["first, second = self.units\nx = second(first(x))"],
    "pool": ["x = torch.mean(x, dim=(-2, -1))", "x = x.mean(dim=[2, 3])"],
    "criterion": ["criterion = F.cross_entropy"],
    "loss": [
        "scores = model(images)\nloss = criterion(scores, labels)",
        "loss = criterion(input=model(images), target=labels)",
    ],
}

MLP = (
    HEAD
    + """
class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        <parts>

    def forward(self, x):
        <layer>


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(20, 64)
        self.hidden = nn.ModuleList([Layer(64) for _ in range(4)])
        self.leave = nn.Linear(64, 1)
        self.last = None

    def forward(self, x):
        <enter>
        <hidden>
        <leave>


def make(batch_size=50):
    model = Perceptron().cuda()
    optimizer = torch.optim.Adam(model.parameters(), <optimizer>)

    def step():
        x, y = torch.randn(batch_size, 20, device="cuda"), torch.randn(batch_size, device="cuda")
        <loss>
        loss.backward()
        <clip>
        optimizer.step()
        <zero>

    return step
"""
)
MLP_BASE = {
    "parts": "self.linear = nn.Linear(width, width)\nself.norm = nn.LayerNorm(width)",
    "layer": "return x + torch.tanh(self.linear(self.norm(x)))",
    "enter": "x = self.enter(x)",
    "hidden": "for layer in self.hidden:\n    x = layer(x)",
    "leave": "return self.leave(x).squeeze(-1)",
    "optimizer": "lr=0.01",
    "loss": "loss = F.mse_loss(model(x), y)",
    "clip": "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    "zero": "optimizer.zero_grad()",
}
MLP_HARMLESS = {
    "parts": ["self.norm = nn.LayerNorm(width)\nself.linear = nn.Linear(width, width)"],
    "layer": [
        "y = self.norm(x)\ny = self.linear(y)\ny = torch.tanh(y)\nreturn x + y",
        "return x + self.linear(F.layer_norm(x, x.shape[-1:], self.norm.weight, "
        "self.norm.bias)).tanh()",
        "return torch.add(x, F.tanh(F.linear(self.norm(x), self.linear.weight, self.linear.bias)))",
        "return nn.Tanh()(self.linear(self.norm(x))) + x",
    ],
    "enter": [
        "x = F.linear(x, self.enter.weight, bias=self.enter.bias)",
        "x = self.enter(input=x)",
    ],
    "hidden": ["for i in range(4):\n    x = self.hidden[i](x)"],
    "leave": ["return self.leave(x).flatten()", "return self.leave(x).view(-1)"],
    "loss": [
        "loss = nn.MSELoss()(model(x), y)",
        "guess = model(x)\nloss = F.mse_loss(input=guess, target=y)",
    ],
    "zero": ["model.zero_grad(set_to_none=True)", "optimizer.zero_grad(True)"],
}

OF_HUB = (
    HEAD
    + """
from types import MethodType
from transformers import <kind>Config, <class>


def make(batch_size=2):
    config = <kind>Config(vocab_size=97, <sizes>)
    <implementation>
    model = <class>(config).to("cuda")
    model.train()
    <patch>
    <checkpoints>
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step():
        tokens = torch.randint(0, 97, (batch_size, 16), device="cuda")
        <loss>
        loss.backward()
        optimizer.step()
        <zero>

    return step
"""
)
HUB_BASE = {
    "kind": "Llama",
    "class": "LlamaForCausalLM",
    "sizes": "hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, "
    "num_key_value_heads=2, use_cache=False",
    "implementation": "config._attn_implementation = 'sdpa'",
    "patch": "",
    "checkpoints": "",
    "loss": """
        logits = model(input_ids=tokens).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    """,
    "zero": "optimizer.zero_grad()",
}
GPT2 = {
    "kind": "GPT2",
    "class": "GPT2LMHeadModel",
    "sizes": "n_embd=32, n_layer=2, n_head=4, n_positions=32, use_cache=False",
}
HUB_HARMLESS = {
    "implementation": ["config._attn_implementation_internal = 'sdpa'"],
    "patch": ["model = model  # as it is", "parts = [*model.modules()]\ndel parts"],
    "loss": [
        """
        inputs = {"input_ids": tokens}
        scores = model(**inputs).logits
        logits = scores[:, :-1]
        del scores
        loss = nn.CrossEntropyLoss()(logits.reshape(-1, 97), tokens[:, 1:].reshape(-1))
        """,
        """
        def loss_of(logits, targets):
            return F.cross_entropy(rearrange(logits, 'b t v -> (b t) v'), targets.flatten())

        loss = loss_of(model(tokens)["logits"][:, :-1], tokens[:, 1:])
        """,
    ],
    "zero": ["model.zero_grad()"],
}
LLAMA_HARMLESS = {
    **HUB_HARMLESS,
    "patch": [
        """
        def feed(self, x):
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

        for layer in model.model.layers:
            layer.mlp.forward = MethodType(feed, layer.mlp)
        """,
        """
        def feed(self, x):
            gate = F.linear(x, self.gate_proj.weight)
            gate = self.act_fn(gate)
            return F.linear(gate * F.linear(x, self.up_proj.weight), self.down_proj.weight)

        for layer in model.model.layers:
            layer.mlp.forward = MethodType(feed, layer.mlp)
        """,
    ],
}


@dataclass(frozen=True)
class Program:
    """A step with lines that have other spellings."""

    source: str
    base: Mapping[str, str]
    harmless: Mapping[str, list[str]]
    names: Mapping[str, str]
    """Names of modules that may be others."""

    def text(self, **lines: str) -> str:
        """The source with these lines in place of the usual ones."""
        text = self.source
        for name, usual in self.base.items():
            line = textwrap.dedent(lines.get(name, usual)).strip()
            spaced = re.compile(rf"^( *)<{name}>$", re.MULTILINE)
            text = spaced.sub(lambda at, line=line: textwrap.indent(line, at[1]), text)
            text = text.replace(f"<{name}>", line)
        return text


NAMES_OF_LM = {
    "layers": "blocks",
    "attn": "attention",
    "ffn": "mlp",
    "qkv": "packed",
    "up": "wide",
    "head": "unembed",
    "norm1": "before",
}
PROGRAMS = {
    "lm": Program(LM, BASE, HARMLESS, NAMES_OF_LM),
    "fused": Program(
        LM,
        BASE | {"attend": FUSED},
        HARMLESS
        | {
            "attend": [
                "y = nn.functional.scaled_dot_product_attention(query=q, key=k, value=v, "
                "attn_mask=None, dropout_p=0.0, is_causal=True)"
            ]
        },
        NAMES_OF_LM,
    ),
    "checkpointed": Program(
        LM, BASE | CHECKPOINTED, HARMLESS | {"loop": [], "blocks": []}, NAMES_OF_LM
    ),
    "conv": Program(CONV, CONV_BASE, CONV_HARMLESS, {"units": "stages", "conv": "filters"}),
    "mlp": Program(MLP, MLP_BASE, MLP_HARMLESS, {"hidden": "inner", "linear": "dense"}),
    "llama": Program(OF_HUB, HUB_BASE, LLAMA_HARMLESS, {}),
    "gpt2": Program(OF_HUB, HUB_BASE | GPT2, HUB_HARMLESS, {}),
}


def drawn(seed: int) -> tuple[str, str]:
    """The name of a program, and a harmless version of it: some lines spelled otherwise, some
    modules named otherwise.
    """
    draw = random.Random(seed)
    name = draw.choice([name for name in PROGRAMS if PROGRAMS[name].harmless])
    program = PROGRAMS[name]
    lines = {}
    for slot, spellings in program.harmless.items():
        if spellings and draw.random() < 0.5:
            lines[slot] = draw.choice(spellings)
    text = program.text(**lines)
    for old, new in program.names.items():
        if draw.random() < 0.3:
            text = re.sub(rf"(?<=self\.){old}\b", new, text)
    return name, text


@dataclass(frozen=True)
class Regression:
    """A version that costs more."""

    program: str
    lines: Mapping[str, str]
    modules: tuple[str, ...]
    """Modules, any of which is right to be named."""
    quantity: str = ""
    """What has grown first; empty for anything."""
    cause: str = ""
    """A word of the cause."""


REGRESSIONS = {
    "lost checkpoint": Regression(
        "checkpointed", {"loop": BASE["loop"]}, ("layers.*",), "saved_bytes"
    ),
    "softmax in fp32": Regression(
        "lm",
        {"attend": NAIVE.replace("scores.softmax(-1)", "scores.float().softmax(-1).to(v.dtype)")},
        ("layers.*.attn",),
        "saved_bytes",
        "softmax in 4-byte",
    ),
    "loss kept in a list": Regression(
        "lm", {"after": "SEEN.append(loss)\nreturn loss.detach()"}, ("layers.*", ""), "kept_nodes"
    ),
    "loss added up with its graph": Regression(
        "lm", {"after": "total = total + loss\nreturn None"}, ("layers.*", ""), "kept_nodes"
    ),
    "logits kept in a list": Regression(
        "lm",
        {"after": "SEEN.append(logits.detach())\nreturn loss.detach()"},
        ("head",),
        "kept_bytes",
    ),
    "graph retained": Regression(
        "lm",
        {"backward": "loss.backward(retain_graph=True)", "after": "return loss"},
        ("layers.*", ""),
        "held_bytes",
    ),
    "copied weight": Regression(
        "lm", {"output": "return F.linear(y, self.out.weight.clone())"}, ("layers.*.attn",)
    ),
    "lost fusion": Regression("fused", {"attend": NAIVE}, ("layers.*.attn",)),
    "doubled head": Regression(
        "lm",
        {
            "more": "self.extra = nn.Linear(width, vocabulary, bias=False)",
            "logits": "return self.head(x) + self.extra(x)",
        },
        ("extra",),
    ),
    "untied head": Regression("tied", {"more": ""}, ("head", "embed"), "held_bytes"),
    "lost in-place activation": Regression(
        "conv", {"unit": "return F.relu(self.norm(self.conv(x)))"}, ("units.*", "", "stem")
    ),
    "extra clone": Regression(
        "lm", {"first": "x = x + self.attn(self.norm1(x.clone()))"}, ("layers.*",)
    ),
    "extra contiguous": Regression(
        "fused", {"attend": "v = v.contiguous()\n" + FUSED}, ("layers.*.attn",)
    ),
    "evaluation without no_grad": Regression(
        "lm",
        {"evaluation": "model.eval()\nmodel(tokens[:1, :-1])\nmodel.train()"},
        ("layers.*", ""),
        "saved_bytes",
    ),
    "mask in fp32": Regression(
        "lm",
        {
            "mask_type": "torch.float32",
            "attend": NAIVE.replace(
                "~self.mask[:length, :length]", "self.mask[:length, :length] == 0"
            ),
        },
        ("layers.*.attn",),
        "held_bytes",
    ),
    "dropout's mask kept in full": Regression(
        "lm",
        {"drop": "kept = (torch.rand_like(x) > 0.1).to(x.dtype) / 0.9\nreturn x * kept"},
        ("layers.*.ffn",),
        "saved_bytes",
    ),
    "loop of an optimizer": Regression(
        "lm", {"optimizer": "foreach=False"}, ("(optimizer)",), "operations"
    ),
    "amsgrad": Regression(
        "lm",
        {"optimizer": "fused=True, amsgrad=True"},
        ("layers.*", ""),
        "held_bytes",
        "optimizer state",
    ),
    "gradients not freed": Regression(
        "lm",
        {"zero": "optimizer.zero_grad(set_to_none=False)"},
        ("layers.*", ""),
        "held_bytes",
        "gradients",
    ),
    "residual stream in fp32": Regression(
        "lm",
        {"second": "x = (x.float() + self.ffn(self.norm2(x)).float()).to(x.dtype)"},
        ("layers.*",),
    ),
    "logits in fp32": Regression(
        "lm",
        {"loss": BASE["loss"].replace("logits.flatten(0, 1)", "logits.float().flatten(0, 1)")},
        ("(forward)",),
        "saved_bytes",
    ),
    "wider feed-forward network": Regression("lm", {"hidden": "5 * width"}, ("layers.*.ffn",)),
    "mask of each layer": Regression(
        "lm",
        {
            "attend": NAIVE.replace(
                "~self.mask[:length, :length]",
                "~torch.ones(length, length, dtype=torch.bool, device=x.device).tril()",
            )
        },
        ("layers.*.attn",),
    ),
    "embedding as a product": Regression(
        "lm",
        {"lookup": "x = F.one_hot(tokens, 211).to(torch.bfloat16) @ self.embed.weight"},
        ("the model itself",),
        "saved_bytes",
    ),
    "loop over heads": Regression(
        "fused",
        {
            "attend": """
                y = torch.stack([
                    F.scaled_dot_product_attention(q[:, i:i + 1], k[:, i:i + 1], v[:, i:i + 1],
                                                   is_causal=True).squeeze(1)
                    for i in range(self.heads)
                ], dim=1)
            """
        },
        ("layers.*.attn",),
    ),
    "three projections": Regression(
        "lm",
        {
            "layers_of_attention": """
                self.q = nn.Linear(width, width, bias=False)
                self.k = nn.Linear(width, width, bias=False)
                self.v = nn.Linear(width, width, bias=False)
                self.out = nn.Linear(width, width, bias=False)
            """,
            "project": "q, k, v = self.q(x), self.k(x), self.v(x)",
        },
        ("layers.*.attn",),
    ),
    "norm twice": Regression(
        "lm", {"first": "x = x + self.attn(self.norm1(self.norm1(x)))"}, ("layers.*.norm1",)
    ),
    "checkpoint where none is needed": Regression(
        "fused",
        {"first": "x = x + checkpoint(self.attn, self.norm1(x), use_reentrant=False)"},
        ("layers.*.attn", "layers.*.attn.qkv"),
        "recomputed_flops",
    ),
    "parts of q by slices": Regression(
        "lm",
        {
            "project": """
                p = self.qkv(x)
                q, k, v = p[..., :width], p[..., width:2 * width], p[..., 2 * width:]
            """
        },
        ("layers.*.attn",),
    ),
    "lost stride": Regression(
        "conv",
        {"units": "self.units = nn.ModuleList([Unit(16, 32, 1), Unit(32, 32, 1)])"},
        ("units.*",),
    ),
    "features kept by the model": Regression(
        "conv",
        {"stem": "x = self.stem(x)\nself.seen.append(x.detach())"},
        ("stem", "stem.norm"),
        "kept_bytes",
    ),
    "bias before a norm": Regression(
        "conv", {"bias": "True"}, ("units.*", "units.*.conv", ""), "held_bytes"
    ),
    "activation held for a log": Regression(
        "mlp",
        {"leave": "self.last = x.detach()\nreturn self.leave(x).squeeze(-1)"},
        ("hidden.*",),
        "held_bytes",
    ),
    "two norms in a layer": Regression(
        "mlp",
        {"layer": "return x + torch.tanh(self.linear(self.norm(self.norm(x))))"},
        ("hidden.*.norm",),
    ),
    "gradients clipped one by one": Regression(
        "mlp",
        {"clip": "for p in model.parameters():\n    nn.utils.clip_grad_norm_([p], 1.0)"},
        ("(backward)",),
        "operations",
    ),
    "attention of transformers unfused": Regression(
        "gpt2",
        {"implementation": "config._attn_implementation = 'eager'"},
        ("transformer.h.*.attn",),
    ),
    "gate kept in fp32": Regression(
        "llama",
        {
            "patch": """
                def feed(self, x):
                    gate = self.act_fn(self.gate_proj(x).double()).float()
                    return self.down_proj(gate * self.up_proj(x))

                for layer in model.model.layers:
                    layer.mlp.forward = MethodType(feed, layer.mlp)
            """
        },
        ("model.layers.*.mlp",),
        "saved_bytes",
    ),
}
PROGRAMS["tied"] = Program(LM, BASE | {"more": "self.head.weight = self.embed.weight"}, {}, {})
