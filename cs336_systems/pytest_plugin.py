"""Plugin of pytest: tests of what a training step costs, on machines without a GPU.

    def test_step(cs336_step):
        step = cs336_step("mine:make", batch_size=8, precision="bf16")
        assert step.peak_gib("H100") <= 41.5
        step.check()  # against what `pytest --cs336-update` has kept

Nothing but pytest is imported before a test asks for the fixture, and torch only by the process
that traces steps.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FILE_NAME = "cs336_steps.json"
"""What steps cost, by their names, in the root directory of the tests."""
STEPS = pytest.StashKey[dict[str, Any]]()
"""Costs of the steps of these tests, by name."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this plugin."""
    group = parser.getgroup("cs336", "costs of training steps")
    group.addoption(
        "--cs336-update", action="store_true", help=f"keep what steps cost in {FILE_NAME}"
    )
    group.addoption(
        "--cs336-table", metavar="FILE", help="write what steps cost, and cost before, as Markdown"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Begin with no steps."""
    config.stash[STEPS] = {}


@pytest.fixture(scope="session")
def cs336_step(pytestconfig: pytest.Config) -> Iterator[Callable[..., Any]]:
    """Make a step of `package.module:factory`, which makes a model or is a step itself, to be
    traced; settings are named as those of `cs336 account`, with underscores.
    """
    from .costs.step_costs import read_costs
    from .costs.traces import traced_elsewhere
    from .tested_step import TestedStep, config_of

    kept = read_costs(_path(pytestconfig))

    def make(model: str, **settings: Any) -> TestedStep:  # noqa: ANN401
        name = " ".join([model, *(f"{name}={settings[name]}" for name in sorted(settings))])
        return TestedStep(
            name=name,
            config=config_of(model, settings),
            given=settings.keys(),
            kept=kept,
            seen=pytestconfig.stash[STEPS],
            updates=pytestconfig.getoption("--cs336-update"),
        )

    with traced_elsewhere():
        yield make


def _path(config: pytest.Config) -> Path:
    return Path(config.rootpath, FILE_NAME)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:  # noqa: ANN401, ARG001
    """Take over the steps of a process of pytest-xdist that ends."""
    node.config.stash[STEPS].update(getattr(node, "workeroutput", {}).get(FILE_NAME, {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the steps to the process that started this one, or write what was asked for."""
    config = session.config
    steps = config.stash[STEPS]
    if hasattr(config, "workeroutput"):
        config.workeroutput[FILE_NAME] = steps
        return
    if not steps:
        return
    from .costs.step_costs import read_costs, write_costs
    from .files import write_atomically
    from .report.formats import to_markdown
    from .report.growth import costs_table

    kept = read_costs(_path(config))
    if table := config.getoption("--cs336-table"):
        write_atomically(Path(table), to_markdown(costs_table(kept.steps, steps)).encode())
    if config.getoption("--cs336-update"):
        write_costs(_path(config), kept, steps)
