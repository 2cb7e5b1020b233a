"""Configurations that differ in any one setting are told apart wherever they stand beside each
other.

The settings are found in the classes of the configuration, among them ones that are not there yet.
"""

import csv
import itertools
import random
import string
from dataclasses import dataclass, replace
from functools import cache

import pytest

from cs336.config import Arch, Mode, ModelConfig, Profiler, RunConfig
from cs336.report.configurations import step_results
from cs336.report.identity import file_names, identities, names_of, shared_settings, short_names_of
from cs336.report.section import labels
from cs336.report.sections.kernels import files as kernel_files
from cs336.report.sections.kernels.entry import Explained
from cs336.report.sections.memory.entry import MemoryEntry
from cs336.report.sections.memory.tables import sections_of as memory_sections
from cs336.report.sections.steps import results_table
from tests.neighbours import make_bases, settings_of
from tests.neighbours import neighbours as pairs_of
from tests.report.making import make_config, make_record
from tests.report.reading import csv_rows
from tests.report.sections.kernels.profiles import make_ranks, make_shared
from tests.report.sections.memory.profiles import make_memory
from tests.report.writing import write_tables


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterModel(ModelConfig):
    """The shape of a model as it may become."""

    window: int = 0
    dropout: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterRun(RunConfig):
    """The settings of a run as they may become."""

    offload: bool = False
    momentum: float = 0.9
    schedule: str | None = None


BASES = make_bases(LaterRun, LaterModel)
MODEL = BASES[0].model
SETTINGS = settings_of(BASES[0])


def each_setting(*but):
    """A test for every setting, apart from some."""
    chosen = [(where, field) for where, field in SETTINGS if field.name not in but]
    return pytest.mark.parametrize(
        ("where", "field"), chosen, ids=[field.name for _, field in chosen]
    )


@cache
def neighbours(where, name, **fixed):
    return pairs_of(BASES, where, name, **fixed)


def kernel_entry(config, **changes):
    record = make_record(config, (0.03, 0.03))
    of_ranks = {"ranks": make_ranks((0, 0), (1, 3))}
    profile = make_shared(**of_ranks | changes)
    plain = make_record(config, (0.02,))
    return Explained(profile=profile, plain=plain, profiled=record)


def memory_entry(config, **changes):
    return MemoryEntry(subject=config, profile=make_memory(**changes), device_name="NVIDIA H200")


def assert_apart(sections, pair):
    """No row of the one is a row of the other, in the table that people read and in the CSV,
    with equal profiles.
    """
    for section in sections:
        for rows in (*(table.rows for table in section.tables[-1:]), csv_rows(section)):
            texts = [str(row) for row in rows]
            half = len(texts) // 2
            assert half, (section.name, pair)
            assert set(texts[:half]).isdisjoint(texts[half:]), (section.name, pair)


@each_setting()
def test_profiled_runs_that_differ_in_one_setting_have_rows_and_names_of_their_own(
    where, field
) -> None:
    pair, *_ = neighbours(
        where, field.name, **({} if field.name == "profiler" else {"profiler": Profiler.KINETO})
    )
    entries = [kernel_entry(config) for config in pair]
    assert (
        len({*labels(entries)})
        == len({name.casefold() for name in file_names(labels(entries))})
        == 2
    )
    assert_apart([make(entries) for make in kernel_files.SUBJECTS], pair)


@each_setting("device")
def test_labels_of_runs_that_differ_in_one_setting_differ(where, field) -> None:
    """A sweep runs on one kind of device."""
    for one, other in neighbours(where, field.name):
        assert one.label != other.label


@each_setting(
    "profiler",
    "device",
    "cuda_graph",
    "loss",
    "blocks",
    "module_depth",
    "update_in_backward",
    "expandable_segments",
    "parallel",
    "ranks",
    "shard_optimizer",
)
def test_recorded_runs_that_differ_in_one_setting_have_rows_and_names_of_their_own(
    where, field
) -> None:
    """Memory is recorded by one profiler, on a GPU, of a run without graphs, in fixed segments
    and in one process.
    """
    pair, *_ = neighbours(where, field.name, profiler=Profiler.MEMORY)
    entries = [memory_entry(config) for config in pair]
    assert len({*labels(entries)}) == len({config.key for config in pair}) == 2
    assert_apart([own for own in memory_sections(entries) if own.tables], pair)


@each_setting("repeat", "profiler")
def test_runs_that_differ_in_one_setting_have_rows_of_their_own(where, field, tmp_path) -> None:
    """Repeats are pooled, and profiled runs have no published time."""
    pair, *_ = neighbours(where, field.name)
    # a run that failed early does not know the name of its device
    device = {"device_name": None} if field.name == "device" else {}
    records = [make_record(config, (0.1, 0.1), **device) for config in pair]
    one, other = results_table(step_results(records)).rows
    assert one != other
    write_tables(records, tmp_path)
    one, other = csv.DictReader((tmp_path / "results.csv").read_text().splitlines())
    assert one != other


def test_all_neighbours_together_are_told_apart() -> None:
    for base in BASES:
        configs = dict.fromkeys(
            config
            for where, field in SETTINGS
            for pair in neighbours(where, field.name)
            if pair[0] == base
            for config in pair
        )
        rows = identities((config, None) for config in configs)
        assert len(rows) > 30
        names = names_of(rows)
        assert len({*names}) == len({name.casefold() for name in file_names(names)}) == len(rows)
        for one, other in itertools.combinations(rows, 2):
            assert len({*names_of([one, other])}) == 2


def test_names_of_files_are_plain_short_and_different_on_every_file_system() -> None:
    names = ["a/b", "a_b", "A_b", "a b", "x" * 300, "x" * 301, "ü", "*", ""]
    found = file_names(names)
    assert found[0] == "a_b"
    assert len({name.casefold() for name in found}) == len(names)
    assert all(
        {*name} <= {*string.ascii_letters, *string.digits, *"._+"} and len(name) <= 110
        for name in found
    )


def test_names_of_files_of_sizes_and_contexts() -> None:
    """Names that earlier sweeps have."""
    configs = [
        RunConfig(
            size=name,
            model=replace(MODEL, context_length=context, d_model=d_model),
            profiler=Profiler.KINETO,
        )
        for name, d_model in (("small", 64), ("2.7B", 128))
        for context in (128, 512)
    ]
    found = file_names(labels([kernel_entry(config) for config in configs]))
    assert found == ["small_ctx_128", "small_ctx_512", "2.7B_ctx_128", "2.7B_ctx_512"]
    assert file_names(labels([kernel_entry(configs[0])])) == ["small_ctx_128"]


def test_texts_that_read_alike_are_told_apart() -> None:
    """A token file may have the name of what stands for none, and long paths may differ where
    they are cut.
    """
    paths = [None, "random", *(f"/{'a' * 50}{middle}{'b' * 50}.npy" for middle in "xy")]
    configs = [replace(BASES[0], tokens=path) for path in paths]
    assert len({*names_of(identities((config, None) for config in configs))}) == 4
    assert (
        len(
            {*results_table(step_results([make_record(config, (0.1,)) for config in configs])).rows}
        )
        == 4
    )


def test_settings_that_all_share_are_said_of_any_valid_configuration() -> None:
    """Also of a shape that no default has: 9 dimensions a head suit GPT-2, and RoPE not."""
    odd = LaterModel(
        arch=Arch.GPT2, context_length=8, d_model=27, d_ff=64, num_layers=1, num_heads=3, window=4
    )
    said = shared_settings(
        [(LaterRun(size="custom", model=odd, mode=Mode.FORWARD, seed=3, offload=True), None)] * 2
    )
    assert {"gpt2 architecture", "seed 3", "window 4", "offload"} <= set(said.split(", "))
    assert "optimizer" not in said
    assert "momentum" not in said


# Files


def test_a_short_name_tells_its_row_from_all_others_by_few_of_the_settings() -> None:
    """Of rows that differ in many settings, one setting of each row is its own."""
    rng = random.Random(3)
    settings = ("batch_size", "warmup_steps", "measured_steps", "seed", "checkpoint_blocks")
    for _ in range(40):
        drawn = []
        for _ in range(rng.randrange(2, 9)):
            drawn.append(make_config("xl", **{name: rng.randrange(2, 5) for name in settings}))
        configs = dict.fromkeys(drawn)
        rows = identities((config, None) for config in configs)
        short, whole = short_names_of(rows), names_of(rows)
        assert len({*short}) == len(rows)
        for name, long in zip(short, whole, strict=True):
            words = iter(long.split())
            assert all(word in words for word in name.split()), (name, long)
    usual, *others = (make_config("xl", seed=seed, batch_size=7 + seed) for seed in range(9))
    rows = identities((config, None) for config in (usual, *others))
    assert all(len(name.split()) == 5 for name in short_names_of(rows))
