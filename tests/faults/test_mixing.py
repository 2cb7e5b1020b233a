"""Records made under other conditions are neither mixed in silently nor lost."""

import json
import shutil

import pytest

from cs336_systems.record import load_records
from cs336_systems.store import SweepError
from tests.faults.harness import ROOT, Witness, command, config, contents, path_of, results, runs, sweep


def made_elsewhere(place, **identity):
    """A finished record, as it would be had it been made under other conditions."""
    sweep(place, config())
    path = path_of(config(), place)
    data = json.loads(path.read_bytes())
    data["environment"]["identity"] |= identity
    path.write_text(json.dumps(data))
    return contents(place / "runs")


CHANGES = [
    ("torch", "1.0"),
    ("driver", "450.80.02"),
    ("device_name", "Voodoo2"),
    ("code", "0123456789abcdef"),
]


@pytest.mark.parametrize(("name", "value"), CHANGES)
def test_other_conditions_are_refused_by_name(place, name, value):
    earlier = made_elsewhere(place, **{name: value})
    witness = Witness()
    with pytest.raises(SweepError, match=f"{name} was {value}, is .*--fresh.*--allow-mixed"):
        sweep(place, config(), config(seed=1), witness=witness)
    assert witness.runs == []
    assert contents(place / "runs") == earlier


def test_other_conditions_are_mixed_when_told_to(place):
    earlier = made_elsewhere(place, torch="1.0")
    outcome = sweep(place, config(), config(seed=1), allow_mixed=True)
    assert [record.config for record in outcome.measured] == [config(seed=1)]
    assert contents(place / "runs").items() >= earlier.items()


def test_a_fresh_start_keeps_the_old_records_beside(place):
    earlier = made_elsewhere(place, torch="1.0")
    outcome = sweep(place, config(), fresh=True)
    assert [record.config for record in outcome.measured] == [config()]
    (beside,) = place.glob("runs-before-*")
    assert contents(beside) == earlier
    again = sweep(place, config(), fresh=True)
    assert len(again.measured) == 1
    assert len(list(place.glob("runs-before-*"))) == 2


def test_a_failed_record_of_other_conditions_is_replaced_without_ado(place):
    sweep(place, config("raises"))
    path = path_of(config("raises"), place)
    data = json.loads(path.read_bytes())
    data["environment"]["identity"]["torch"] = "1.0"
    path.write_text(json.dumps(data))
    outcome = sweep(place, config("raises"))
    assert len(outcome.measured) == 1


def test_changed_code_is_refused_by_the_command(launch, place):
    sweep(results(place), config())
    earlier = contents(runs(place))
    changed = place / "changed"
    shutil.copytree(ROOT / "cs336_systems", changed / "cs336_systems", ignore=shutil.ignore_patterns("__pycache__"))
    script = shutil.copy(ROOT / "benchmark_sweep.py", changed)
    with (changed / "cs336_systems" / "model.py").open("a") as file:
        file.write("# faster\n")
    refused = launch(command(script=script))
    assert refused.wait() == 1
    assert "code was " in refused.stderr
    assert "Traceback" not in refused.stderr
    assert contents(runs(place)) == earlier
    assert len(load_records(runs(place))[0]) == 1
