"""What a profiled step would take with each change: a table, and the sentence that names what would shorten it.

This is the one place where a profile proposes flags.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from cs336_systems.analysis.advice import NOT_IN_USE, Remedy
from cs336_systems.analysis.kernels.what_if import Counterfactual, WhatIf
from cs336_systems.config import RunConfig
from cs336_systems.costs.time import Limit
from cs336_systems.report.columns import Row, column
from cs336_systems.report.entries import over_configurations, rows_of
from cs336_systems.report.numbers import percent_of, ratio
from cs336_systems.report.section import Section
from cs336_systems.report.sections.kernels.entries import Explained
from cs336_systems.report.sections.kernels.words import ms

MIN_GAIN_SHARE = 0.01
"""Smallest reported gain, as a share of the step: repeated runs differ by as much."""
MOST_TOLD = 4
"""Most changes that the sentence names; the table has all."""
AS_IT_IS = "as it is"
_CHANGES: Mapping[Remedy, str] = {
    Remedy.GRAPHS: "launches for free",
    Remedy.COMPILE: "neighbouring kernels fused",
    Remedy.ATTENTION: "attention fused",
    Remedy.OPTIMIZER: "AdamW fused",
    Remedy.TF32: "products in tf32",
    Remedy.BF16: "products in bf16",
    Remedy.FP16: "products in fp16",
    Remedy.OVERLAP: "no exposed communication",
}
_LIMITS = {Limit.DEVICE: "the GPU", Limit.LAUNCHES: "the CPU"}
_CSV = ("what_if", "flags", "changed_step_ms", "gain_ms", "gain_share", "limited_by")
_MEANING = (
    "The kernels of the step of median time, launched by the host and run by the GPU in order, are replayed as they "
    "are and with one change. How long a fused kernel takes is a rule of thumb; times of products and casts at another "
    "precision are those of the measured ceilings."
)
_OF_PROFILER = "Launches take as long as under the profiler, which makes each slower: without one the CPU limits less."


def what_if_section(entries: Sequence[Explained]) -> Section:
    """The replayed step as it is and with each change that is open to its run, the largest gain first."""
    is_slow = any(entry.what_if is not None and entry.what_if.is_host_of_profiler for entry in entries)
    return over_configurations(
        "what_if", "What if", rows_of(entries, _rows), [*map(column, _CSV)], _CSV,
        [_MEANING, *([_OF_PROFILER] if is_slow else [])],
    )  # fmt: skip


def _rows(entry: Explained) -> Iterator[Row]:
    found = entry.what_if
    if found is None or found.step_s is None or found.limit is None:
        return
    yield _row(AS_IT_IS, "", found.step_s, None, found.step_s, found.limit)
    for each in found.changed:
        if each.step_s is not None and each.limit is not None:
            yield _row(
                change_of(each.remedy, entry.config), each.remedy.named_for(entry.config), each.step_s,
                found.gain_s(each), found.step_s, each.limit,
            )  # fmt: skip


def _row(change: str, flags: str, step_s: float, gain_s: float | None, whole_s: float, limit: Limit) -> Row:
    return {
        "what_if": change,
        "flags": flags,
        "changed_step_ms": step_s * 1e3,
        "gain_ms": None if gain_s is None else gain_s * 1e3,
        "gain_share": ratio(gain_s, whole_s),
        "limited_by": _LIMITS[limit],
    }


def change_of(remedy: Remedy, config: RunConfig | None) -> str:
    """The change in words."""
    needs_fused = remedy is Remedy.GRAPHS and config is not None and Remedy.OPTIMIZER.is_open_to(config)
    return f"{_CHANGES[remedy]}, {_CHANGES[Remedy.OPTIMIZER]}" if needs_fused else _CHANGES[remedy]


def proposals(found: WhatIf, config: RunConfig | None, evident: Collection[Remedy]) -> str:
    """What would shorten the step, the largest gain first; changes of unknown gain only if they are `evident`."""
    known = [each for each in found.changed if each.step_s is not None]
    useful = [each for each in known if (found.gain_s(each) or 0.0) >= MIN_GAIN_SHARE * (found.step_s or 0.0)]
    unknown = [each.remedy for each in found.changed if each.step_s is None and each.remedy in evident]
    parts = []
    if useful and found.step_s is not None:
        told = "; ".join(_told(each, config, found) for each in useful[:MOST_TOLD])
        parts.append(f"Replayed without a change, the step takes {ms(found.step_s)}. It would take {told}.")
    elif known and found.step_s is not None:
        named = ", ".join(change_of(each.remedy, config) for each in known)
        parts.append(f"Nothing of this would shorten the step by {100 * MIN_GAIN_SHARE:g} %: {named}.")
    if unknown:
        named = ", ".join(remedy.named_for(config) for remedy in unknown)
        if config is None:
            named += f", {NOT_IN_USE}"
        more = " too" if parts else ""
        parts.append(f"What may shorten it{more}, by how much this profile does not tell: {named}.")
    return " ".join(parts)


def _told(each: Counterfactual, config: RunConfig | None, found: WhatIf) -> str:
    """`22.0 ms with products in bf16 (--mixed-precision; 55.2 % less)`."""
    flags = "" if config is None else f"{each.remedy.named_for(config)}; "
    gain = percent_of(found.gain_s(each) or 0.0, found.step_s or 0.0)
    return f"{ms(each.step_s or 0.0)} with {change_of(each.remedy, config)} ({flags}{gain} less)"
