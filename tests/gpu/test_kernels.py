"""Kernels booked to the right phase on a real GPU, by both profilers, and known causes found by
name.
"""

import shutil
import time
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from cs336.analysis.kernels.explain import explain
from cs336.analysis.kernels.phases import LaunchPhase
from cs336.analysis.kernels.step_profile import decode_profile
from cs336.config import SIZES, Attention, Device, Mode, Phase, Profiler, RunConfig
from cs336.measure.run import measure
from cs336.model.transformer import TransformerLM
from cs336.record import Status
from cs336.report.sections.kernels.entry import Explained
from cs336.report.sections.kernels.findings import findings
from cs336.sweep.run import run_sweep
from cs336.sweep.store import explanation_path
from tests.analysis.kernels.tracing import num_matmuls
from tests.faults.harness import Witness

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

TIMED = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


def config_of(size, context_length=512, **changes):
    model = replace(SIZES[size], context_length=context_length)
    return RunConfig(size=size, model=model, device=Device.CUDA, measured_steps=5, **changes)


def phase(profile, name):
    return next(times for times in profile.phases if times.phase == name)


def num_unattributed(profile):
    return sum(
        sum(times.launches) for times in profile.phases if times.phase is LaunchPhase.UNATTRIBUTED
    )


def mean_s(times_s):
    return sum(times_s) / len(times_s)


def profiled(config, tmp_path, model=None):
    """The run in this process under torch.profiler."""
    watched = replace(config, profiler=Profiler.KINETO)
    record = measure(watched, model, profile=tmp_path / "trace.json.gz")
    assert record.status is Status.OK, record.failure
    return record, explain(tmp_path / "trace.json.gz", watched)


@pytest.fixture
def after_optimizer():
    """Does something at the end of every optimizer step, inside its range."""
    handles = []
    yield lambda act: handles.append(
        register_optimizer_step_post_hook(lambda optimizer, *_: act(optimizer))
    )
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize(
    ("changes", "attention_products"),
    [({}, 2), ({"mode": Mode.FORWARD_BACKWARD}, 2), ({"model": {"attention": Attention.SDPA}}, 0)],
)
def test_eager_models_launch_seven_products_a_layer_and_one(changes, attention_products, tmp_path):
    shape = changes.pop("model", {})
    config = config_of("small", 128, **changes)
    config = replace(config, model=replace(config.model, **shape))
    _, profile = profiled(config, tmp_path)
    layers, steps = config.model.num_layers, profile.num_steps
    products = (7 + attention_products) * layers + 1
    assert num_matmuls(profile, LaunchPhase.FORWARD) == steps * products
    assert num_matmuls(profile, LaunchPhase.BACKWARD) == steps * 2 * products
    assert (
        sum(part.product_count for part in profile.attention) == steps * attention_products * layers
    )
    assert not num_unattributed(profile)


ACROSS_RUNS = 0.05
"""Relative difference between runs of one step: the power limit gives a large model other clocks
in each run.
"""


@pytest.mark.alone
def test_nsys_kineto_and_events_see_the_same(tmp_path):
    """In fresh processes: Kineto slows launches in a process for good. xl, so that it matters
    little to the GPU.
    """
    assert shutil.which("nsys"), "this machine should have nsys"
    config = config_of("xl")
    nsys, kineto = (
        replace(config, profiler=Profiler.NSYS),
        replace(config, profiler=Profiler.KINETO),
    )
    outcome = run_sweep([config, nsys, kineto], tmp_path, Witness(), timeout_s=120)
    plain, *watched = (
        next(record for record in outcome.records if record.config == c)
        for c in (config, nsys, kineto)
    )
    seen = [
        decode_profile(explanation_path(c, tmp_path / "runs").read_bytes()) for c in (nsys, kineto)
    ]
    for timed in TIMED:
        by_nsys, by_kineto = (phase(profile, timed) for profile in seen)
        assert set(by_nsys.launches) == set(by_kineto.launches)
        assert mean_s(by_nsys.kernel_s) == pytest.approx(
            mean_s(by_kineto.kernel_s), rel=ACROSS_RUNS
        )
        for times, record in zip((by_nsys, by_kineto), watched, strict=True):
            assert mean_s(times.wall_s) == pytest.approx(
                record.measurement(timed).mean_s, rel=0.02
            ), "the same steps"
            plain_s = plain.measurement(timed).mean_s
            assert mean_s(times.wall_s) >= (1 - ACROSS_RUNS) * plain_s
            # a profiler slows a slow host's launches: what it adds is idle time of the device
            assert mean_s(times.busy_s) <= (1 + ACROSS_RUNS) * plain_s


def said_of(profile):
    """All findings of the profile, as one text."""
    return " ".join(finding.text for finding in findings(Explained(profile=profile)))


class Pausing(nn.Module):
    """The model, and a pause of the host or of the device in each forward pass."""

    def __init__(self, model, pause):
        super().__init__()
        self.model, self.pause = model, pause

    def forward(self, tokens):
        logits = self.model(tokens)
        self.pause()
        return logits


def small_model():
    config = config_of("small", 256)
    with torch.device("cuda"):
        return config, TransformerLM(config.model)


def wait_and_sleep():
    torch.cuda.synchronize()
    time.sleep(0.03)


@pytest.mark.alone
def test_a_host_that_sleeps_in_forward_is_named(tmp_path):
    config, model = small_model()
    _, profile = profiled(config, tmp_path, Pausing(model, wait_and_sleep))
    said = said_of(profile)
    print(said)
    longest = profile.gaps[0]
    assert longest.duration_s == pytest.approx(0.03, rel=0.1)
    assert (longest.phase, longest.cause) == (LaunchPhase.FORWARD, "host pause")
    assert "forward" in said
    assert f"{longest.duration_s * 1e3:.1f} ms" in said


@pytest.mark.alone
def test_a_kernel_that_nobody_knows_and_takes_long_is_named(tmp_path):
    config, model = small_model()
    _, profile = profiled(config, tmp_path, Pausing(model, lambda: torch.cuda._sleep(100_000_000)))
    said = said_of(profile)
    print(said)
    assert "spin_kernel" in said
    assert (
        phase(profile, LaunchPhase.FORWARD).kernel_s > phase(profile, LaunchPhase.BACKWARD).kernel_s
    )


def test_an_item_in_the_optimizer_is_named(after_optimizer, tmp_path):
    def look_at_every_weight(optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.flatten()[0].item()

    config, model = small_model()
    plain = " ".join(
        finding.text
        for finding in findings(Explained(profile=profiled(config, tmp_path, model)[1]))
    )
    after_optimizer(look_at_every_weight)
    _, profile = profiled(config, tmp_path, model)
    said = said_of(profile)
    print(said)
    waits = [
        c
        for c in profile.host_calls
        if c.phase is LaunchPhase.OPTIMIZER and "Synchronize" in c.name
    ]
    assert sum(call.count for call in waits) == profile.num_steps * len(list(model.parameters()))
    assert "wait" in said
    assert "optimizer" in said
    assert "waits" not in plain


@pytest.mark.alone
def test_a_model_too_small_for_the_gpu_is_named(tmp_path):
    big = " ".join(
        finding.text
        for finding in findings(Explained(profile=profiled(config_of("large"), tmp_path)[1]))
    )
    _, profile = profiled(config_of("tiny", 64), tmp_path)
    said = said_of(profile)
    print(said, big, sep="\n")
    assert "The CPU is the limit" in said
    assert "The CPU is the limit" not in big
    wall = sum(sum(times.wall_s) for times in profile.phases)
    assert sum(sum(times.busy_s) for times in profile.phases) < 0.7 * wall
