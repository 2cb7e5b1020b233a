"""The figures about steps on several GPUs, each computed from a committed file."""

from collections.abc import Mapping, Sequence
from itertools import product

from cs336.config import Parallel
from cs336.costs.accounting import component_flops
from cs336.record import RunRecord
from tests.statements.documents import Row, Value, claim, linked, one, said, some, table
from tests.statements.results import RESULTS, mean_ms, number, records

PROFILED, FAST = "parallel/kineto_profiles/xl", "parallel/e2e_benchmark/xl_fast"
GPT2, WHOLE = "parallel/e2e_benchmark/gpt2_fast", "parallel/e2e_benchmark/whole_batch"
LEADERBOARD = "parallel/e2e_benchmark/leaderboard"
PYTORCH = ("ddp", "fsdp2")


def steps(document: str, directory: str) -> tuple[dict[str, str], ...]:
    return linked(document, f"{directory}/results.csv")


@claim
def ways() -> Sequence[Row]:
    columns = {
        "step": "step_mean_ms",
        "collectives": "collective_mean_ms",
        "exposed": "exposed_mean_ms",
    }
    return [
        {"way": row["parallel"], "peak (GiB)": number(row, "peak_allocated_gib")}
        | {f"{name} (ms)": float(row[key]) if row[key] else "" for name, key in columns.items()}
        for row in some(steps(RESULTS, PROFILED), shard_optimizer=False)
    ]


@claim
def price_of_overlapping() -> Sequence[Value]:
    found = steps(RESULTS, PROFILED)
    overlap, flat = (
        one(found, parallel=way, shard_optimizer=False) for way in ("ddp-overlap", "ddp-flat")
    )
    longer_ms = number(overlap, "backward_mean_ms") - number(alone(PROFILED), "backward_mean_ms")
    return longer_ms, number(flat, "step_mean_ms") - number(overlap, "step_mean_ms")


@claim
def fastest_way() -> Sequence[Value]:
    fastest = min(table(f"{FAST}/results.csv"), key=lambda row: number(row, "step_mean_ms"))
    assert (fastest["parallel"], fastest["shard_optimizer"]) == ("ddp-push", "True")
    return mean_ms(fastest, "step"), mean_ms(alone(FAST), "step")


def alone(directory: str) -> Mapping[str, str]:
    return one(table(f"{directory}/results.csv"), parallel="none")


@claim
def fast_ways() -> Sequence[Row]:
    found, of_gpt2 = steps(RESULTS, FAST), steps(RESULTS, GPT2)
    order = [(way, False) for way in ("none", "ddp-naive", "ddp-flat", "ddp-overlap", "ddp-push")]
    order += [("ddp-overlap", True), ("ddp-push", True)]
    order += [(way, False) for way in ("fsdp", "fsdp-push", *PYTORCH)]
    assert len(order) == len(found)
    rows: list[Row] = []
    for way, is_sharded in order:
        row = one(found, parallel=way, shard_optimizer=is_sharded)
        same = some(of_gpt2, parallel=way, shard_optimizer=is_sharded)
        name = "one GPU" if way == "none" else way
        rows.append(
            {
                "way": name
                + (" (PyTorch)" if way in PYTORCH else ", optimizer sharded" if is_sharded else ""),
                "xl": number(row, "step_mean_ms"),
                "peak of xl (GiB)": number(row, "peak_allocated_gib"),
                "gpt2": number(same[0], "step_mean_ms") if same else "",
            }
        )
    return rows


@claim
def losses_of_ranks() -> Sequence[Value]:
    """In so many first steps as the document says."""
    _, of_gpt2, _, of_xl = said(RESULTS, "losses_of_ranks", 4)
    gpt2 = largest_distance(GPT2, "gpt2", int(of_gpt2))
    xl = largest_distance(FAST, "xl", int(of_xl))
    return bound(gpt2), of_gpt2, bound(xl), of_xl


def bound(percent: float) -> float:
    """The percentage rounded up to hundredths."""
    return -(-percent * 100 // 1) / 100


def largest_distance(directory: str, size: str, num_steps: int) -> float:
    """Of the losses of the first steps of every way, from those of one process with the whole batch
    (%).
    """
    (whole,) = (record for record in records(WHOLE) if record.config.size == size)
    shared = [
        record for record in records(directory) if record.config.parallel is not Parallel.NONE
    ]
    assert {record.config.batch_size * record.config.ranks for record in shared} == {
        whole.config.batch_size
    }
    return max(distance(record, whole, step) for record, step in product(shared, range(num_steps)))


def distance(record: RunRecord, whole: RunRecord, step: int) -> float:
    return 100 * abs(record.losses[step] / whole.losses[step] - 1)


@claim
def leaderboard() -> Sequence[Value]:
    every = steps(RESULTS, LEADERBOARD)
    in_bf16 = one(every, bf16_embedding="True", parallel="fsdp")
    in_fp8 = one(every, fp8="True")
    mfu = 100 * number(in_bf16, "mfu")
    config = records(LEADERBOARD)[0].config
    full, masked = (
        sum(part.step for part in component_flops(config, causal=causal))
        for causal in (False, True)
    )
    return (
        number(in_bf16, "step_mean_ms") / 1e3,
        number(in_fp8, "step_mean_ms") / 1e3,
        number(in_fp8, "peak_allocated_gib"),
        mfu,
        mfu * masked / full,
    )


@claim
def sharded_optimizer() -> Sequence[Value]:
    found = some(steps(RESULTS, PROFILED), parallel="ddp-overlap")
    sharded, whole = (one(found, shard_optimizer=value) for value in (True, False))
    ratios = [number(sharded, name) / number(whole, name) for name in ("step_mean_ms", "sent_mib")]
    return *(number(row, "peak_allocated_gib") for row in (sharded, whole)), *ratios
