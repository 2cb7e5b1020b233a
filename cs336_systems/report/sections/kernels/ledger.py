"""The ledger of a step: what each kind of kernel takes beside the limit of the device, and what is
lost to it, which adds up to the step.
"""

from collections.abc import Iterator, Sequence

from ....analysis.kernels.phases import LaunchPhase
from ....analysis.kernels.step_profile import LedgerTimes, Part, StepProfile
from ....config import ModelConfig, Precision, RunConfig
from ....costs.tape import MATMULS_OF, Form
from ...columns import Column, Row, column
from ...section import Section, make_table
from ...words import percent, ratio, rounded, scaled
from .entry import Explained
from .operators import Ceiling, ceiling_of

MAX_ROWS = 25
"""Rows of the table; the CSV has all."""
NO_KERNEL = "no kernel runs"
_NAMES_SHOWN = 3


def ledger_section(entry: Explained) -> Section:
    """What the step's time is lost to, the largest loss first."""
    profile = entry.profile
    if not profile.ledger:
        return Section(name="ledger")
    ceiling = ceiling_of(profile)
    rows = [_row(times, profile, ceiling, entry.config) for times in profile.ledger]
    rows.append(_idle_row(entry))
    rows.sort(key=lambda row: -row["lost_ms_per_step"])
    columns = [
        Column("kernels", "", "What the kernels do, or their names.", key="what", write=str),
        Column("shape", "", "Rows x inner side x columns of the matmul.", key="shape", write=str),
        column("phase", drop_order=1),
        Column("calls", "", "Calls per step.", key="calls_per_step", drop_order=2, write=rounded),
        Column("time", "ms", "Time per step.", key="ms_per_step", write=rounded),
        Column("limit", "ms", "The device's limit.", key="limit_ms_per_step", write=rounded),
        Column("lost", "ms", "Time beyond the limit.", key="lost_ms_per_step", write=rounded),
    ]
    notes = [*_notes(rows, ceiling)]
    table = make_table("Where the step's time is lost", columns, rows[:MAX_ROWS], notes)
    return Section(name="ledger", tables=(table,), rows=rows)


def _row(
    times: LedgerTimes, profile: StepProfile, ceiling: Ceiling, config: RunConfig | None
) -> Row:
    """The values of kernels that do the same, per step."""
    steps = profile.num_steps
    least_s = limit_s(times, ceiling)
    return {
        "what": _what(times, config),
        "shape": _shape(times),
        "phase": times.phase,
        "part": times.part,
        "names": " + ".join(times.names),
        "calls_per_step": times.calls / steps,
        "kernels_per_step": times.count / steps,
        "ms_per_step": times.counted_s / steps * 1e3,
        "beside_others_ms_per_step": scaled(times.beside_others_s, 1e3 / steps),
        "limit_ms_per_step": least_s / steps * 1e3,
        "lost_ms_per_step": (times.counted_s - least_s) / steps * 1e3,
        "tflops_per_s": scaled(ratio(times.flops, times.total_s), 1e-12),
        "gb_per_s": scaled(ratio(times.bytes, times.total_s), 1e-9),
    }


def _idle_row(entry: Explained) -> Row:
    """The time of the step in which no kernel runs, all of which is lost."""
    profile = entry.profile
    span = entry.span()
    kernels_s = sum(times.counted_s for times in profile.ledger)
    idle_ms = (span.whole_s - kernels_s) / profile.num_steps * 1e3
    return {
        "what": NO_KERNEL,
        "shape": "",
        "phase": "",
        "part": "",
        "names": "",
        "calls_per_step": None,
        "kernels_per_step": None,
        "ms_per_step": idle_ms,
        "beside_others_ms_per_step": 0.0,
        "limit_ms_per_step": 0.0,
        "lost_ms_per_step": idle_ms,
        "tflops_per_s": None,
        "gb_per_s": None,
    }


def limit_s(times: LedgerTimes, ceiling: Ceiling) -> float:
    """The least time of these kernels at the device's rates, never more than is counted for them; 0
    for what the tape has nothing of.
    """
    least = [0.0]
    rate = _flops_per_s(times, ceiling)
    if times.flops and rate:
        least.append(times.flops / rate)
    if times.bytes and ceiling.bytes_per_s:
        least.append(times.bytes / ceiling.bytes_per_s)
    # caches hold what memory would have to move, and clocks differ between processes
    return min(max(least), times.counted_s)


def _flops_per_s(times: LedgerTimes, ceiling: Ceiling) -> float | None:
    """The limit of the kernels' matmuls."""
    if times.form in MATMULS_OF:
        measured = ceiling.attention_flops_per_s(times.form, times.sides[1])
        if measured is not None:
            return measured
    match times.element_bytes:
        case 1:
            return ceiling.fp8_flops_per_s
        case 2:
            return ceiling.flops_per_s(Precision.BF16)
        case 4:
            return ceiling.flops_per_s(Precision.TF32)
    return None


def _what(times: LedgerTimes, config: RunConfig | None) -> str:
    """What the kernels do in words: the layer of a matmul, else their names."""
    if times.form is None:
        names = " + ".join(times.names[:_NAMES_SHOWN])
        return f"{names} + ..." if len(times.names) > _NAMES_SHOWN else names
    if times.form in MATMULS_OF:
        return "attention"
    layer = "matmul" if config is None else _layer(times.sides, config)
    return f"{layer}, {_OF[_form(times, config)]}"


_OF = {Form.FORWARD: "x W^T", Form.INPUT: "gradient of x", Form.WEIGHT: "gradient of W"}


def _form(times: LedgerTimes, config: RunConfig | None) -> Form:
    """What the matmul computes. In fp8 all are laid out as in forward, so that the phase tells it,
    and whether it adds up over the tokens.
    """
    assert times.form is not None
    if times.element_bytes != 1 or times.phase is not LaunchPhase.BACKWARD or config is None:
        return times.form
    return Form.WEIGHT if times.sides[1] == _tokens(config) else Form.INPUT


def _tokens(config: RunConfig) -> int:
    return config.batch_size * config.model.context_length


def _layer(sides: Sequence[int], config: RunConfig) -> str:
    """The layer whose weight has the sides that are left without the tokens."""
    tokens = _tokens(config)
    weight = [*sides]
    if tokens in weight:
        weight.remove(tokens)
    return _layers(config.model, config.pad_vocabulary).get(frozenset(weight), "matmul")


def _layers(model: ModelConfig, multiple: int) -> dict[frozenset[int], str]:
    """Names of layers by the two sides of their weights, packed as the fast model does."""
    padded = model.vocab_size + -model.vocab_size % multiple
    d_model = model.d_model
    return {
        frozenset({padded, d_model}): "head",
        frozenset({2 * model.d_ff, d_model}): "feed-forward, gate and up",
        frozenset({model.d_ff, d_model}): "feed-forward",
        frozenset({3 * d_model, d_model}): "attention's q, k, v",
        frozenset({d_model}): "attention's output",
    }


def _shape(times: LedgerTimes) -> str:
    """The sides of a matmul; of attention heads, positions and width."""
    if times.form is None:
        return ""
    sides = "x".join(map(str, times.sides))
    return f"{times.batch}x{sides}" if times.batch > 1 else sides


def _notes(rows: list[Row], ceiling: Ceiling) -> Iterator[str]:
    whole_ms = sum(row["ms_per_step"] for row in rows)
    lost_ms = sum(row["lost_ms_per_step"] for row in rows)
    yield (
        f"Of the step's {rounded(whole_ms)} ms, {rounded(lost_ms)} ms "
        f"({percent(lost_ms, whole_ms)} %) are lost."
    )
    yield (
        "Matmuls and attention are matched in order with those of the step's tape; what runs "
        "between two of them stands together, beside the bytes that the tape moves there."
    )
    beside_ms = sum(row["beside_others_ms_per_step"] or 0.0 for row in rows)
    if beside_ms:
        yield (
            "Each moment counts once, for computing before communication: kernels ran for "
            f"{rounded(beside_ms)} ms beside others, which counts for those."
        )
    if ceiling.spec is None and ceiling.curves is None:
        yield "No limit of the device is known, so that all time counts as lost."
    if any(row["part"] is Part.MATMUL and not row["shape"] for row in rows):
        yield "Matmuls without a shape are in a phase whose matmuls are not those of the tape."
    if len(rows) > MAX_ROWS:
        shown = sum(row["lost_ms_per_step"] for row in rows[:MAX_ROWS])
        yield f"Shown are {MAX_ROWS} of {len(rows)} rows, {percent(shown, lost_ms)} % of the loss."
