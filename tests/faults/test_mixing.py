"""Records made under other conditions are neither mixed in silently nor lost."""

import json
import sys
from dataclasses import replace

import pytest

from cs336 import cli
from cs336.record import Status
from cs336.sweep.store import SweepError
from tests.faults.harness import Witness, config, contents, path_of, sweep

pytestmark = pytest.mark.usefixtures("no_pictures")


def made_elsewhere(place, record, **identity):
    """Write the text of a finished record as it would be had it been made under other
    conditions.
    """
    data = json.loads(record)
    data["environment"]["identity"] |= identity
    path_of(config(), place).write_text(json.dumps(data))
    return contents(place / "runs")


CHANGES = [
    ("torch", "1.0"),
    ("driver", "450.80.02"),
    ("device_name", "Voodoo2"),
    ("code", "0123456789abcdef"),
]


def test_other_conditions_are_refused_by_name_and_mixed_when_told_to(place):
    sweep(place, config())
    whole = path_of(config(), place).read_text()
    for name, value in CHANGES:
        earlier = made_elsewhere(place, whole, **{name: value})
        witness = Witness()
        with pytest.raises(SweepError, match=f"{name} was {value}, is .*--fresh.*--allow-mixed"):
            sweep(place, config(), config(seed=1), witness=witness)
        assert witness.runs == []
        assert contents(place / "runs") == earlier
    outcome = sweep(place, config(), config(seed=1), allow_mixed=True)
    assert [record.config for record in outcome.measured] == [config(seed=1)]
    assert contents(place / "runs").items() >= earlier.items()


def test_a_record_of_a_later_version_is_left_alone(place):
    sweep(place, config())
    path = path_of(config(), place)
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"format_version": 99}))
    earlier = contents(place / "runs")
    with pytest.raises(
        SweepError, match=r"format version 99 is newer than .*; update it, or choose another"
    ):
        sweep(place, config(), config(seed=1))
    assert contents(place / "runs") == earlier


def test_a_fresh_start_keeps_the_old_records_beside(place):
    sweep(place, config())
    earlier = made_elsewhere(place, path_of(config(), place).read_text(), torch="1.0")
    outcome = sweep(place, config(), fresh=True)
    assert [record.config for record in outcome.measured] == [config()]
    (beside,) = place.glob("runs-before-*")
    assert contents(beside) == earlier


MODEL = """
from torch import nn
from {module}_layers import Table
def make(vocab_size, d_model, d_ff, num_layers, num_heads):
    return nn.Sequential(Table(vocab_size))
"""
LAYERS = """
from torch import nn
class Table(nn.Embedding):
    def __init__(self, vocab_size):
        super().__init__(vocab_size, vocab_size)
"""
EDIT = "# slower\n"
FLAGS = (
    "--vocab-size",
    "11",
    "--d-model",
    "8",
    "--d-ff",
    "16",
    "--num-layers",
    "1",
    "--num-heads",
    "2",
    "--device",
    "cpu",
    "--warmup-steps",
    "10",
    "--measured-steps",
    "10",
)


def own_model(place, module):
    """The file of a user's own model, and that of what it imports."""
    files = place / f"{module}.py", place / f"{module}_layers.py"
    files[0].write_text(MODEL.format(module=module))
    files[1].write_text(LAYERS)
    return files


def append(path, text=EDIT):
    with path.open("a") as file:
        file.write(text)


def sweep_of(module, *more):
    return cli.sweep(
        [*FLAGS, "--model", f"{module}:make", "--context-lengths", "8", "--name", "own", *more]
    )


def records_in(place):
    """Every record below, by its path there: its bytes, and when they were written."""
    found = place.glob("data/*/*/runs/*.json")
    return {path.relative_to(place): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


def test_a_model_that_was_edited_is_not_given_its_old_times(place, capsys):
    _, imported = own_model(place, module := "edited")
    assert sweep_of(module) == 0
    earlier = records_in(place)
    assert sweep_of(module) == 0
    assert records_in(place) == earlier, "nothing has changed, and nothing is measured again"
    append(imported)
    capsys.readouterr()
    assert sweep_of(module) == 1
    refusal = capsys.readouterr().err
    assert f"source of {module}:make was " in refusal
    assert "--fresh" in refusal
    assert records_in(place) == earlier
    assert sweep_of(module, "--allow-mixed") == 0
    assert records_in(place) == earlier
    assert sweep_of(module, "--fresh") == 0
    assert records_in(place).keys() == earlier.keys()
    assert all(records_in(place)[path] != earlier[path] for path in earlier)
    assert not {module, f"{module}_layers"} & set(sys.modules), (
        "the process that watches imports no user's code"
    )


def test_a_model_edited_while_the_sweep_runs_gives_no_result_of_mixed_versions(place):
    path, _ = own_model(place, "edited_meanwhile")
    append(path, f"open({str(path)!r}, 'a').write({EDIT!r})\n")  # whoever imports it edits it
    before, after = (
        replace(config(seed=seed), model_factory="edited_meanwhile:make") for seed in (0, 1)
    )
    outcome = sweep(place, before, after)
    assert [record.status for record in outcome.measured] == [Status.OK, Status.INVALID]
    message = outcome.measured[1].failure.message
    assert message.startswith("changed while the sweep ran: source of edited_meanwhile:make was ")
    assert message.endswith("start over with --fresh")
    with pytest.raises(SweepError, match="source of edited_meanwhile:make was"):
        sweep(place, before, after)
