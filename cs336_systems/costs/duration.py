"""Predicts how long a run takes, including everything besides its steps, and how long a sweep of runs takes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cs336_systems.config import CompileMode, Device, Profiler, RunConfig
from cs336_systems.costs.curves import Curves
from cs336_systems.costs.ranks_time import predicted_time

RUN_S = {Device.CUDA: 0.8, Device.CPU: 0.4}
"""Time of a run besides its steps: process, on a GPU its CUDA context, model, first kernels, record.

On a GPU the 150 runs of the sweeps train, train_bf16, train_fp32, sdpa and inference in data/e2e_benchmark took 0.74 to
0.87 s each, from the start of one to that of the next, whatever the size of the model. On a CPU making the model of
size tiny and its first steps took 0.22 to 0.28 s more than its later steps do; the rest is the process."""
START_S = 1.5
"""Time of a sweep before its first run, to import PyTorch: 1.4 to 2.2 s on 2 cores of an AMD EPYC."""
COMPILED_S = 6.0
"""Additional time of a run with compiled blocks, with the compiler's cache on disk.

In train_fast and train_fast_batch16 it was 4.3 to 7.3 s, and 10.4 s for the first, which filled the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """How long the runs of a sweep should take, as far as that is known."""

    steps_s: Mapping[RunConfig, float]
    """The predicted step of each run."""
    runs_s: Mapping[RunConfig, float]
    """Predicted time of each whole run, including runs that will run out of memory and end early."""
    num_gpus: int = 1
    """GPUs that take the next run whenever they are free."""
    curves: Curves | None = None
    """The ceilings from which the times are predicted."""

    def total_s(self, configs: Iterable[RunConfig]) -> float | None:
        """Time until the last of these runs ends, in this order; None if that of any run is not known.

        A run on several ranks waits until as many GPUs are free.
        """
        free_s = [0.0] * self.num_gpus
        for config in configs:
            if (run_s := self.runs_s.get(config)) is None:
                return None
            count = min(config.ranks, self.num_gpus)
            free_s = sorted([free_s[count - 1] + run_s] * count + free_s[count:])
        return free_s[-1]

    def sweep_s(self, configs: Sequence[RunConfig]) -> float | None:
        """Time of a sweep of these runs, in this order, from its start; None if that of any run is not known."""
        total_s = self.total_s(configs)
        return total_s if total_s is None or not configs else START_S + total_s


NOTHING_EXPECTED = Expected(steps_s={}, runs_s={})


def expect(configs: Iterable[RunConfig], too_large: Iterable[RunConfig], curves: Curves, num_gpus: int = 1) -> Expected:
    """Predict times from the ceilings of the device; runs in `too_large` are expected to end before their first step.

    No time is predicted for a run under a profiler, which slows the run.
    """
    failing = {config.configuration for config in too_large}
    steps_s: dict[RunConfig, float] = {}
    runs_s: dict[RunConfig, float] = {}
    for config in configs:
        if config.configuration in failing:
            runs_s[config] = RUN_S[config.device]
        elif config.profiler is Profiler.NONE and (found := predicted_time(config, curves)) is not None:
            steps_s[config] = found.step_s
            compiled_s = 0.0 if config.compile is CompileMode.NONE else COMPILED_S
            num_steps = config.warmup_steps + config.measured_steps
            runs_s[config] = RUN_S[config.device] + compiled_s + num_steps * found.step_s
    return Expected(steps_s=steps_s, runs_s=runs_s, num_gpus=num_gpus, curves=curves)
