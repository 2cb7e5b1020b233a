"""The napkin's answers as tables: each line says how it follows from those above."""

from cs336_systems.costs.napkin import (
    FORWARD_FLOPS,
    SECONDS_PER_DAY,
    TRAINING_FLOPS,
    largest_model,
    rule_of_thumb_flops,
    training_days,
)
from cs336_systems.report.numbers import amount
from cs336_systems.report.table import Table, quantity_table

KEYS = ("quantity", "amount", "unit", "how")


def days_table(
    *, parameters: float, tokens: float, peak_flops_per_s: float, peak_source: str, count: int, mfu: float
) -> Table:
    """How many days training takes, or hours, minutes, seconds; `peak_source` says where the peak comes from."""
    flops, flops_per_s = rule_of_thumb_flops(parameters, tokens), count * peak_flops_per_s * mfu
    days = training_days(parameters=parameters, tokens=tokens, peak_flops_per_s=peak_flops_per_s, count=count, mfu=mfu)
    unit, unit_s = _unit_of_time(days * SECONDS_PER_DAY)
    time = days * SECONDS_PER_DAY / unit_s
    backward = TRAINING_FLOPS - FORWARD_FLOPS
    rows = (
        ("parameters N", parameters, "", "given"),
        ("tokens T", tokens, "", "given"),
        ("FLOPs of the training", flops, "FLOP", f"{TRAINING_FLOPS} N T"),
        ("peak of one device", peak_flops_per_s, "FLOP/s", peak_source),
        ("devices", count, "", "given"),
        ("MFU", mfu, "", "given"),
        ("FLOPs per second", flops_per_s, "FLOP/s", "devices x peak x MFU"),
        ("time", flops / flops_per_s, "s", "FLOPs / FLOPs per second"),
        *([("time", time, unit, f"seconds / {unit_s:,}")] if unit_s > 1 else ()),
    )
    note = (
        f"Each parameter takes {TRAINING_FLOPS} FLOPs per token: {FORWARD_FLOPS} in forward, a multiply-add, and "
        f"{backward} in backward, one product for the gradient of the input and one for that of the weight. "
        "MFU is the share of the promised dense peak that is put to these FLOPs. Attention's scores and values "
        "come on top, and so do restarts."
    )
    return quantity_table(f"Training takes {amount(time)} {unit}", rows, [note], KEYS)


def largest_table(*, memory_bytes: float, count: int, bytes_per_parameter: float) -> Table:
    """How large a model fits so many devices."""
    parameters = largest_model(memory_bytes=memory_bytes, count=count, bytes_per_parameter=bytes_per_parameter)
    rows = (
        ("memory of one device", memory_bytes, "byte", "given, 1 GB = 1e9 bytes"),
        ("devices", count, "", "given"),
        ("memory of all", count * memory_bytes, "byte", "devices x memory"),
        ("bytes of a parameter", bytes_per_parameter, "byte", "given"),
        ("largest model", parameters, "parameters", "memory of all / bytes of a parameter"),
    )
    note = (
        "AdamW in fp32 holds 16 bytes for each parameter: 4 for it, 4 for its gradient, 8 for its two moments. "
        "Nothing is held twice, so all of it is sharded over the devices; activations come on top."
    )
    return quantity_table(f"The largest model has {amount(parameters)} parameters", rows, [note], KEYS)


def _unit_of_time(time_s: float) -> tuple[str, int]:
    """The largest unit of which the time is one or more, seconds for less than all, and its seconds."""
    units = (("days", SECONDS_PER_DAY), ("hours", 3600), ("minutes", 60))
    return next((unit for unit in units if time_s >= unit[1]), ("s", 1))
