"""The step that `--fast` chooses, compiled and in graphs, computes with the checkpoint that is loaded into it."""

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
from dataclasses import replace
from cs336_systems.measure.clock import make_clock
from cs336_systems.config import Arch, Attention, Device, ModelConfig, RunConfig
from cs336_systems.model.fast.choose import fastest
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.measure.step import TrainingStep

arch, fp8 = Arch(sys.argv[1]), sys.argv[2] == "fp8"
plain = ModelConfig(vocab_size=1001, context_length=128, d_model=256, d_ff=1024, num_layers=4, num_heads=4, arch=arch)
torch.manual_seed(1)
reference = TransformerLM(plain).cuda()
fast = fastest(RunConfig(size="custom", model=plain, device=Device.CUDA), torch.cuda.get_device_name())
config = replace(fast, fp8=fp8)
assert config.cuda_graph and config.compile_blocks and config.cast_once and config.fused_loss
assert config.fused_blocks
step, clock = TrainingStep(config), make_clock(config)
for _ in range(6):
    step(clock)
step.model.load_state_dict(reference.state_dict())

seen, draw = [], step.batches
step.batches = lambda: seen.append(draw()) or seen[-1]
replayed = step(clock)[1].item()
step.model.load_state_dict(reference.state_dict())  # which the step has changed
with torch.no_grad():
    tokens, targets = seen[0]
    expected = reference(tokens)
    loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten()).item()
    found = step.logits(tokens)
away = ((found - expected).norm() / expected.norm()).item()
print(json.dumps({"shape": list(found.shape), "logits": away, "loss": abs(replayed - loss) / loss}))
"""


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("arch", ["cs336", "gpt2"])
def test_a_loaded_checkpoint_gives_the_reference_s_logits_and_loss(arch: str, fp8: bool) -> None:
    """Also where graphs were captured before it was loaded. The reference is eager, in fp32, attention written out.

    In a fresh process: the shape checks of tests do not compile.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, arch, "fp8" if fp8 else "bf16"],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["shape"] == [4, 128, 1001]
    assert found["logits"] < (0.15 if fp8 else 0.02)
    assert found["loss"] < (1e-2 if fp8 else 1e-3)
