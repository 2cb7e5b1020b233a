"""`cs336 plan` of models of one's own: ranks divide what their files and traces say, printed
commands are accepted, and questions that have no answer say why.
"""

import csv
import json
import random
from pathlib import Path

import pytest

from cs336.cli import main
from cs336.commands import account

SEEDS = 6


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This machine has none, and no ceilings; modules are looked for beside the results."""
    monkeypatch.setattr(account, "first_gpu", lambda: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def rows_of(folder: Path, *words: str) -> list[dict[str, str]]:
    assert main(["plan", *words, "--output", str(folder)]) == 0
    table = folder / "plan.csv"
    if not table.exists():  # no layout is foretold
        return []
    with table.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_tensor_ranks_divide_heads_keys_and_every_matrix_of_a_file(
    seed: int, tmp_path: Path
) -> None:
    """Sequences are fewer than GPUs, so that all layouts have tensor ranks or stages."""
    pytest.importorskip("transformers")
    draw = random.Random(seed)
    heads = draw.choice([8, 16])
    sizes = {
        "hidden_size": 32 * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([1, 2, 4, heads]),
        "intermediate_size": draw.choice([512, 516, 514]),
        "num_hidden_layers": 8,
        "vocab_size": 1000,
        "max_position_embeddings": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"model_type": "llama"}))
    rows = rows_of(
        tmp_path / "out", "--model", f"hf:{tmp_path}", "--gpus", "8xH100", "--global-batch", "4"
    )
    tried = {int(row["tensor"]) for row in rows}
    assert tried or sizes["num_key_value_heads"] < heads
    for tensor in tried:
        for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            assert sizes[key] % tensor == 0, (key, sizes[key], tensor)


def test_a_batch_that_ranks_cannot_share_says_what_they_cannot_divide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"model_type": "llama"}))
    words = ["--context-length", "1024", "--gpus", "8xH100", "--global-batch", "1"]
    assert main(["plan", "--model", f"hf:{tmp_path}", *words]) == 0
    said = capsys.readouterr().out
    assert "1 sequence cannot be shared by 8 GPUs" in said
    assert "tensor 8 does not divide 2 heads of keys" in said


FACTORY = """
from torch import nn
class Model(nn.Module):
    def __init__(self, vocab_size=512, d_model=128, num_layers=3):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        blocks = [nn.TransformerEncoderLayer(d_model, 4, 256, batch_first=True)
                  for _ in range(num_layers)]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(d_model, vocab_size)
    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)
def make({parameters}):
    return Model({given})
"""


@pytest.mark.parametrize("taken", [[], ["d_model"], ["vocab_size", "num_layers"]])
def test_commands_of_rows_ask_only_for_what_a_factory_takes(
    taken: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flag that it does not take is refused."""
    given = ", ".join(f"{name}={name}" for name in taken)
    module = f"takes_{len(taken)}"
    text = FACTORY.format(parameters=", ".join(taken), given=given)
    (tmp_path / f"{module}.py").write_text(text)
    words = ["--model", f"{module}:make", "--context-length", "256", "--gpus", "8xH100"]
    rows = rows_of(tmp_path / "out", *words)
    commands = [row["run_by"] for row in rows if row["run_by"].startswith("cs336")]
    assert commands
    for command in commands[:2]:
        capsys.readouterr()
        assert main(["account", *command.split()[2:], "--device-name", "H100"]) == 0


def test_a_budget_below_a_gigabyte_is_said_with_its_digits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--size", "small", "--gpus", "8xH100", "--global-batch", "8"]
    assert main(["plan", *words, "--budget-gib", "0.25"]) == 0
    assert " of 0.25 GiB" in capsys.readouterr().out


def test_a_price_needs_a_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--size", "small", "--gpus", "8xH100", "--price", "2"]) == 2
    assert "--price needs --tokens" in capsys.readouterr().err


def test_the_sequences_of_a_rank_may_be_no_multiple_of_two(tmp_path: Path) -> None:
    """14 sequences of each of 72 GPUs: twice 7, or all at once, which is faster than 64 GPUs."""
    words = ["--size", "small", "--tokens", "100B", "--gpus"]
    many, few = (rows_of(tmp_path / gpus, *words, gpus) for gpus in ("72xH100", "64xH100"))
    assert {int(row["micro_batch"]) for row in many} >= {7, 14}
    rates = []
    for rows, gpus in ((many, 72), (few, 64)):
        fastest = rows[0]
        sequences = gpus * int(fastest["micro_batch"]) * int(fastest["accumulate"])
        rates.append(sequences / float(fastest["step_ms"]))
    assert rates[0] > rates[1]
