"""Shapes are checked in the modules of CHECKED, unless steps are timed; GPU tests run only where
there is a GPU.
"""

import contextlib
import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

from cs336.costs import kernels
from cs336.interrupt import STOP_SIGNALS
from cs336.sweep import isolation

CHECKED = (
    "model.transformer",
    "model.optimizer",
    "model.batches",
    "model.fast.blocks",
    "model.fast.cross_entropy",
    "measure.step",
    "studies.precision",
)
"""Modules whose annotated shapes are checked. The compiler cannot trace checked functions, so tests
that compile use tests/plain.py. After a change here, delete __pycache__ of the package: it holds
modules without the checks.
"""

LONG = (
    "test_interrupts",
    "test_interpreted_kernels",
    "test_hostile_texts",
    "test_explaining",
    "test_disk",
    "test_imports",
    "test_statements",
    "test_site",
    "test_nsys",
    "test_runs",
    "test_installed",
    "test_profiled_runs",
    "test_modules",
    "test_browser",
    "test_start_up",
    "test_worker_faults",
    "test_fast",
    "test_notebook",
    "test_other_systems",
    "test_ways",
    "test_step_costs",
    "test_pytest_plugin",
)
"""Files with few tests that take ten seconds and more."""


@pytest.fixture(autouse=True)
def loops_are_not_reported_at_the_end() -> Iterator[None]:
    """Forget the loops that a test has watched, which the end of the process would report."""
    yield
    exits = sys.modules.get("cs336.watched.loop")
    for loop in list(exits.UNREPORTED) if exits else ():
        loop.remove()


@pytest.fixture(scope="session", autouse=True)
def programs_hear_signals() -> None:
    """Programs that tests start end by signals, also where the tests were started under nohup or in
    the background.

    A program inherits which signals are ignored, but not which have a handler: this process goes on
    without any effect.
    """
    for number in (*STOP_SIGNALS, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.fixture
def ctrl_c_is_heard() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where the tests were started with SIGINT ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture(autouse=True)
def without_kernel_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """What --fast chooses is the same where QuACK and FlashAttention 4 are installed; tests of
    it say that they are.
    """
    monkeypatch.setattr("cs336.model.fast.packages.is_installed", lambda _: False)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory, so that all that commands make is seen, and no ceilings of the
    checkout's user.
    """
    monkeypatch.chdir(tmp_path)
    return tmp_path


class HostTime:
    """A clock that stands still but for those who sleep by it, so that times are exact on a busy
    machine.
    """

    def __init__(self) -> None:
        self.now_ns = 0

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


@pytest.fixture
def host_time(monkeypatch: pytest.MonkeyPatch) -> HostTime:
    """The time that the clocks of steps read in this test."""
    made = HostTime()
    monkeypatch.setattr("cs336.measure.clock.perf_counter_ns", lambda: made.now_ns)
    return made


def pytest_configure(config: pytest.Config) -> None:
    """With `-m gpu ...` steps are timed in this process, to which the checks add half a millisecond
    a block.

    pytest-xdist sets COLUMNS, which would fold what is printed.
    """
    os.environ.pop("COLUMNS", None)
    # Models this small gain nothing from more threads, and lose much of it where other programs are
    # at work.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Compiling headers ahead saves time for hundreds of kernels; a test has a few.
    os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
    config.option.loadscopereorder = False  # pytest-xdist: see pytest_collection_modifyitems
    # in a new clone each compiles what the other does not
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        large = ("torch._dynamo", "ray", "pandas", "matplotlib.figure", "scipy.stats")
        for name in large if worker == "gw0" else reversed(large):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    if not config.option.markexpr.startswith("gpu"):
        install_import_hook([f"cs336.{name}" for name in CHECKED], "beartype.beartype")


@pytest.fixture(scope="session", autouse=True)
def no_waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Files need not survive a crash of this machine: thousands of them would wait some
    milliseconds each.

    The fork server serves all tests of this process, so it imports once what any run, study or rank
    of tests asks for, and looks for programs first in the folder that this returns, where a test
    can put one.
    """
    programs = tmp_path_factory.mktemp("bin")
    more = ("cs336.model.fast.model", "cs336.studies.attention_cell", "tests.parallel.checks")
    modules = [
        *isolation._PRELOAD,
        *isolation.EXPLAINING,
        *more,
        "torch.distributed.fsdp",
        "scipy.special",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolation, "_PRELOAD", (*modules,))
        patch.setattr(os, "fsync", lambda _descriptor: None)
        patch.setenv("PATH", str(programs), prepend=":")
        yield programs


def look_once_at_flags() -> Iterator[None]:
    """The command line of a user is one; here are hundreds, for each of which tyro would look at
    all classes again.
    """
    from tyro._parsers import ParserSpecification as Looked

    kept, look = {}, Looked.from_callable_or_type

    def look_once(kind, **how):
        key = (
            (kind, how["description"], how["intern_prefix"])
            if not how["parent_classes"]
            else object()
        )
        return kept.get(key) or kept.setdefault(key, look(kind, **how))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Looked, "from_callable_or_type", staticmethod(look_once))
        yield


flags_looked_at_once = pytest.fixture(look_once_at_flags, scope="session", autouse=True)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are planned but not drawn, which takes a tenth of a second each; tests of plots
    draw them.
    """
    monkeypatch.setattr("cs336.report.draw.png_of", lambda _picture: b"a picture")
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda _figure, file, **_: file.write(b"a picture")
    )


@pytest.fixture
def fp8_products_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers in fp8 call the operation on this CPU that they call on a GPU, whose calls a
    test counts.
    """
    import torch

    def matmul(a, b, a_unit, b_unit, dtype, bias=None, use_fast_accum=False):
        return torch._scaled_mm(
            a, b, a_unit, b_unit, bias=bias, out_dtype=dtype, use_fast_accum=use_fast_accum
        )

    monkeypatch.setattr("cs336.model.fast.fp8._matmul", matmul)


@pytest.fixture(scope="session", autouse=True)
def own_locks() -> Iterator[None]:
    """Each process of `-n` has its own temporary directory, in which sweeps lock a GPU and see
    others on a CPU.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        yield
        return
    directory = Path(tempfile.gettempdir()) / f"cs336-{worker}-{os.getpid()}"
    directory.mkdir()
    directory.chmod(0o1777)  # as /tmp: some tests become other users
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(directory))
        patch.setattr(tempfile, "tempdir", str(directory))
        yield
    # after multiprocessing has removed what it has there, with priority -100
    Finalize(None, shutil.rmtree, (directory,), {"ignore_errors": True}, exitpriority=-200)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n`, LONG comes first, then the others by their tests.

    Otherwise, a file that takes long could be the last one, while the other processes have nothing
    to do.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        counts = Counter(item.path for item in items)
        items.sort(key=lambda item: (item.path.stem not in LONG, -counts[item.path]))
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="session", autouse=True)
def other_processor() -> None:
    """Compute as a processor that rounds otherwise, if that was asked for."""
    if "OTHER_PROCESSOR" in os.environ:
        from tests.rounding import enter_other_processor

        enter_other_processor()


@pytest.fixture(scope="module", autouse=True)
def little_to_look_through() -> None:
    """Each measurement collects garbage; among all that is there before a file's tests is none."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_rate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All matmuls reach the highest rate that was measured, so that a step is its FLOPs over it."""
    for name, value in {"TILES": ((1, 1),), "TILE_COST": 0.0, "INNER_COST": 0.0}.items():
        monkeypatch.setattr(kernels, name, value)
    kernels.Rates.model_s.cache_clear()
    yield
    kernels.Rates.model_s.cache_clear()
