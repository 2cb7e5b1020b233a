"""Records of a small grid and of a warm-up study."""

import pytest

from cs336.config import Precision
from cs336.record import Status
from tests.report.making import make_config, make_failure, make_record


@pytest.fixture
def grid():
    """Two sizes, two contexts, two precisions: fp32 takes twice as long, but `xl` at 512 has no
    memory for it.
    """
    records = []
    for size, base_s in (("small", 0.050), ("xl", 0.300)):
        for context_length in (128, 512):
            for precision, factor in ((Precision.FP32, 2), (Precision.BF16, 1)):
                config = make_config(size, context_length, precision=precision)
                if (size, context_length, precision) == ("xl", 512, Precision.FP32):
                    records.append(make_failure(config))
                else:
                    mean_s = base_s * factor * context_length / 128
                    records.append(make_record(config, (0.9 * mean_s, mean_s, 1.1 * mean_s)))
    return records


@pytest.fixture
def warmup_records():
    """Three numbers of warm-up steps; without any, the first step takes ten times as long; one
    run was killed.
    """
    times = {0: (1.0, 0.1, 0.1), 1: (0.2, 0.1, 0.1), 5: (0.1, 0.1, 0.1)}
    records = [
        make_record(make_config(warmup_steps=n, measured_steps=3), t) for n, t in times.items()
    ]
    return [
        *records,
        make_failure(make_config(warmup_steps=2, measured_steps=3), Status.KILLED, "killed"),
    ]
