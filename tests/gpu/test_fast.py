"""The step that `--fast` chooses, compiled and in graphs, against the reference with the same
weights.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SCRIPT = """
import json, sys, torch
from cs336.commands.configure import make_fast_config
from cs336.config import Arch, Device, ModelConfig
from cs336.measure.clock import make_clock
from cs336.measure.step import TrainingStep
from cs336.model.transformer import TransformerLM

shape = {
    "vocab_size": 1001,
    "context_length": 128,
    "d_model": 256,
    "d_ff": 1024,
    "num_layers": 4,
    "num_heads": 4,
}
shape["arch"] = Arch(sys.argv[1])
torch.manual_seed(1)
reference = TransformerLM(ModelConfig(**shape)).cuda()
config = make_fast_config(Device.CUDA, {"fp8": sys.argv[2] == "fp8"}, size="small", **shape)
assert config.cuda_graph and config.cast_once and config.fused_loss
assert config.compile_blocks == config.fp8
assert config.fused_blocks
step, clock = TrainingStep(config), make_clock(config)
for _ in range(6):
    step(clock)
names = [name for name, _ in step.model.named_parameters()]
weights = {name: weight.values() for name, weight in zip(names, step.model.weights, strict=True)}
reference.load_state_dict(weights, strict=False)  # strict would miss a tied weight's second name
with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
    found = step.model(step.batches()[0])  # before the next step changes the weights

seen, draw = [], step.batches
step.batches = lambda: seen.append(draw()) or seen[-1]
replayed = step(clock)[1].item()
with torch.no_grad():
    tokens, targets = seen[0]
    expected = reference(tokens)
    loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten()).item()
away = ((found - expected).norm() / expected.norm()).item()
print(json.dumps({"shape": list(found.shape), "logits": away, "loss": abs(replayed - loss) / loss}))
"""


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("arch", ["cs336", "gpt2"])
def test_logits_and_loss_are_those_of_the_reference(arch, fp8):
    """Of a replayed graph. The reference is eager, in fp32, with attention written out.

    In a fresh process: the shape checks of tests do not compile.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, arch, "fp8" if fp8 else "bf16"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["shape"] == [4, 128, 1001]
    assert result["logits"] < (0.15 if fp8 else 0.02)
    assert result["loss"] < (1e-2 if fp8 else 1e-3)


CHANGED = """
import json, sys, torch
from cs336.commands.configure import make_fast_config
from cs336.config import Device, ModelConfig
from cs336.costs.fast_memory import FastMemory
from cs336.measure.clock import make_clock
from cs336.measure.step import TrainingStep
from cs336.model.transformer import TransformerLM

shape = {
    "vocab_size": 1024,
    "context_length": 4096,
    "d_model": 1024,
    "d_ff": 2816,
    "num_layers": 6,
    "num_heads": 8,
}
plain = {"size": "small", "batch_size": 2, "learning_rate": 1e-5, **shape}
changes = json.loads(sys.argv[1])
config = make_fast_config(Device.CUDA, changes, **plain, **changes)
torch.manual_seed(0)
step, clock = TrainingStep(config), make_clock(config)
losses = [step(clock)[1].item() for _ in range(6)]
graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
    step(clock)
    torch.cuda.synchronize()
kernels = [
    event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA
]
attention = sum("fprop" in event.name or "flash_fwd" in event.name for event in kernels)
peaks = {"peak": step.graph.peak_bytes, "foretold": FastMemory(config).peak_bytes}
print(
    json.dumps(
        {
            "losses": losses,
            "graphs": graphs,
            "attention": attention,
            "kernels": len(kernels),
            "parameters": sum(p.numel() for p in TransformerLM(ModelConfig(**shape)).parameters()),
            **peaks,
        }
    )
)
"""


def changed(**changes):
    """What the step with these changes does, in a fresh process: memory is its own, and shape
    checks do not compile.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHANGED, json.dumps(changes)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=140,
    )
    assert done.returncode == 0, done.stderr
    print(changes, done.stdout)
    return json.loads(done.stdout)


def test_selective_checkpoints_in_graphs_give_the_same_losses_and_run_attention_once():
    """Blocks of one kind are compiled once."""
    selective = {"checkpoint_blocks": 1, "selective_checkpoints": True}
    plain, *others = changed(), changed(**selective), changed(**selective, keep_hidden=4)
    for result in others:
        assert result["losses"] == pytest.approx(plain["losses"], rel=1e-3)
        assert result["attention"] == plain["attention"] == 6
        assert result["peak"] == pytest.approx(result["foretold"], rel=0.05)
    assert [result["graphs"] for result in (plain, *others)] == [0, 1, 2]


def test_torch_compile_finds_nothing_in_blocks_of_ready_kernels():
    """So --fast leaves it out: the same training, in no more kernels and no more memory."""
    plain, compiled = changed(), changed(compile="default")
    assert (plain["graphs"], compiled["graphs"]) == (0, 1)
    assert plain["losses"] == pytest.approx(compiled["losses"], rel=1e-3)
    assert plain["kernels"] <= compiled["kernels"]
    for result in (plain, compiled):
        assert result["peak"] == pytest.approx(result["foretold"], rel=0.05)


def test_moments_in_bf16_are_the_same_training_in_less_memory():
    """2 bytes less for each of two moments of a parameter; the peaks may lie at places of the step
    between which there is one tensor more, in bf16 and as large as the residual stream.
    """
    plain, result = changed(), changed(bf16_moments=True)
    assert result["losses"] == pytest.approx(plain["losses"], rel=1e-3)
    stream_bytes = 2 * 2 * 4096 * 1024
    saved = plain["peak"] - result["peak"]
    assert saved == pytest.approx(4 * result["parameters"], abs=stream_bytes)
    assert result["peak"] == pytest.approx(result["foretold"], rel=0.05)
