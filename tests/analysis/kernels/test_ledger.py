"""Kernels of drawn steps, whose operations are known, against what the ledger makes of them."""

import random
from collections import Counter, defaultdict

import pandas as pd
import pytest

from cs336.analysis.kernels.ledger import ledger_times
from cs336.analysis.kernels.phases import CODES, LaunchPhase
from cs336.analysis.kernels.step_profile import Part
from cs336.costs.tape import Form, Operation, OperationKind

LAYOUTS = {Form.FORWARD: "TNT", Form.INPUT: "NNT", Form.WEIGHT: "NTT"}
PRE, MAIN, POST = "flash_bwd_preprocess", "cudnn_sdpa_flash_bprop", "flash_bwd_convert_dq"
STEPS = 3


def matmul(form: Form, sides: tuple[int, int, int], element_bytes: int = 2) -> Operation:
    return Operation(
        kind=OperationKind.MATMUL,
        form=form,
        sides=sides,
        element_bytes=element_bytes,
        moved_bytes=7 * sides[0],
    )


def attention(form: Form) -> Operation:
    return Operation(
        kind=OperationKind.ATTENTION, form=form, sides=(8, 4, 8), batch=5, element_bytes=2
    )


def moves(num_bytes: int) -> Operation:
    return Operation(kind=OperationKind.PASS, moved_bytes=num_bytes)


class Drawn:
    """Steps that are drawn from a seed: the tape, the kernels, and what each operation took."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.rows: list[dict[str, object]] = []
        self.strings: list[str] = []
        self.expected: Counter[tuple[Form, tuple[int, int, int]]] = Counter()
        self.between: Counter[str] = Counter()
        forward, backward = [moves(10)], [moves(20)]
        for layer in range(self.chance.randint(2, 5)):
            inner = 16 * (layer % 2 + 1)
            forward += [
                matmul(Form.FORWARD, (64, inner, 48)),
                attention(Form.ATTENTION),
                moves(30),
                matmul(Form.FORWARD, (64, 48, inner)),
                moves(40),
            ]
            backward += [
                attention(Form.ATTENTION_BACKWARD),
                moves(50),
                matmul(Form.INPUT, (64, 48, inner)),
                matmul(Form.WEIGHT, (48, 64, inner)),
                moves(60),
            ]
        self.operations = {"forward": forward, "backward": backward, "optimizer": [moves(70)]}
        for step in range(STEPS):
            self.run(step)

    def run(self, step: int) -> None:
        """Run one step, in which the compiler swaps some gradients, and fills stand anywhere."""
        for phase, operations in self.operations.items():
            for place, operation in enumerate(self.swapped(operations, step)):
                self.launch(phase, step, operation, place)

    def swapped(self, operations: list[Operation], step: int) -> list[Operation]:
        order, chance = [*operations], random.Random(step)
        for place in range(1, len(order)):
            is_pair = order[place - 1].form is Form.INPUT and order[place].form is Form.WEIGHT
            if is_pair and chance.random() < 0.5:
                order[place - 1], order[place] = order[place], order[place - 1]
        return order

    def launch(self, phase: str, step: int, operation: Operation, place: int) -> None:
        if operation.form is Form.ATTENTION:
            names = ["cudnn_sdpa_flash_fprop"]
        elif operation.form is Form.ATTENTION_BACKWARD:
            names = [PRE, MAIN, POST]
        elif operation.is_matmul:
            names = [f"nvjet_tst_{operation.sides[0]}_h_bz_coopA_{LAYOUTS[operation.form]}"]
            names += ["splitKreduce_kernel"] * (place % 2)
        else:
            names = [f"norm_{operation.moved_bytes}"]
        for name in names:
            time_ns = self.kernel(phase, step, name)
            if operation.is_matmul:
                self.expected[operation.form, operation.sides] += time_ns
            else:
                self.between[phase] += time_ns
        if self.chance.random() < 0.3:
            self.between[phase] += self.kernel(phase, step, "FillFunctor<float>")

    def kernel(self, phase: str, step: int, name: str) -> int:
        if name not in self.strings:
            self.strings.append(name)
        time_ns = self.chance.randrange(10**6)
        self.rows.append(
            {
                "name": self.strings.index(name),
                "phase": CODES[LaunchPhase(phase)],
                "step": step,
                "start_ns": len(self.rows),
                "duration_ns": time_ns,
            }
        )
        return time_ns

    @property
    def frame(self) -> pd.DataFrame:
        """The kernels in any order."""
        return pd.DataFrame(self.rows).sample(frac=1, random_state=0)


@pytest.mark.parametrize("seed", range(8))
def test_each_matmul_of_a_drawn_step_gets_its_own_time(seed: int) -> None:
    drawn = Drawn(seed)
    ledger = ledger_times(drawn.frame, drawn.strings, drawn.operations)
    times_ns = defaultdict(int)
    between_ns = Counter()
    for row in ledger:
        if row.form is not None:
            times_ns[row.form, row.sides] += round(row.total_s * 1e9)
        else:
            assert row.part is Part.BETWEEN
            between_ns[row.phase.value] += round(row.total_s * 1e9)
    assert times_ns == drawn.expected
    assert between_ns == drawn.between
    assert sum(row.count for row in ledger) == len(drawn.rows)
    for phase, operations in drawn.operations.items():
        rows = [row for row in ledger if row.phase == phase]
        flops = sum(
            2 * operation.multiplications
            for operation in operations
            if operation.kind is OperationKind.MATMUL
        )
        found = [row.flops or 0 for row in rows if row.part is Part.MATMUL]
        assert sum(found) == STEPS * flops


def test_causal_attention_has_the_flops_of_the_pairs_that_its_mask_leaves() -> None:
    drawn = Drawn(1)
    ledger = ledger_times(drawn.frame, drawn.strings, drawn.operations)
    # pairs of 8 positions, each with itself and those before; two matmuls of 4 wide heads, 5 heads
    pairs = sum(1 for query in range(8) for key in range(8) if key <= query)
    for row in ledger:
        if row.form is Form.ATTENTION:
            assert row.flops == row.calls * 2 * 2 * pairs * 4 * 5


def test_a_phase_with_other_matmuls_than_the_tape_has_names_only() -> None:
    drawn = Drawn(2)
    drawn.operations["backward"].append(matmul(Form.INPUT, (64, 48, 16)))
    ledger = ledger_times(drawn.frame, drawn.strings, drawn.operations)
    assert all(row.flops is None for row in ledger if row.phase is LaunchPhase.BACKWARD)
    assert any(row.flops for row in ledger if row.phase is LaunchPhase.FORWARD)
    total_ns = sum(round(row.total_s * 1e9) for row in ledger)
    assert total_ns == sum(int(row["duration_ns"]) for row in drawn.rows)


@pytest.mark.parametrize("seed", range(20))
def test_each_moment_counts_once_where_streams_run_at_once(seed: int) -> None:
    """Against a look at every nanosecond of a short drawn step of three streams."""
    chance = random.Random(seed)
    names = ["nvjet_tst_h_bz_coopA_TNT", "norm", "ncclDevKernel_AllGather_RING_LL"]
    rows: list[dict[str, int]] = []
    for stream in range(3):
        now = 0
        for _ in range(chance.randint(0, 8)):
            name = 2 if stream == 2 else chance.randrange(2)
            start, time = now + chance.randint(0, 9), chance.randint(1, 30)
            rows.append({"name": name, "start_ns": start, "duration_ns": time})
            now = start + time
    frame = pd.DataFrame(rows, columns=["name", "start_ns", "duration_ns"]).astype("int64")
    frame = frame.assign(phase=CODES[LaunchPhase.FORWARD], step=0)
    ledger = ledger_times(frame, names, {})
    counted: Counter[str] = Counter()
    for moment in range(1000):
        open_ones = [
            (row["name"] == 2, row["start_ns"], place)
            for place, row in enumerate(rows)
            if row["start_ns"] <= moment < row["start_ns"] + row["duration_ns"]
        ]
        if open_ones:
            counted[names[rows[min(open_ones)[2]]["name"]]] += 1
    found: Counter[str] = Counter()
    for line in ledger:
        part = {Part.MATMUL: 0, Part.BETWEEN: 1, Part.COMMUNICATION: 2}[line.part]
        found[names[part]] += round(line.counted_s * 1e9)
    assert found == counted
    assert sum(round(line.total_s * 1e9) for line in ledger) == sum(frame["duration_ns"])
