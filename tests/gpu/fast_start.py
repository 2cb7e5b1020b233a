"""Records where the time of `--fast` goes: its start, with caches cold and warm, and the kernels of
a few steps.

`python tests/gpu/fast_start.py OUT SECONDS` begins no further command after so many seconds.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

GPT2 = "--size gpt2 --context-length 1024 --batch-size 16"
XL = "--size gpt2-xl --context-length 1024 --batch-size 4"
LARGEST = "--size 2.7B --context-length 1024 --batch-size 16"
PROFILE = "--profile --measured-steps 3"
COMMANDS = {
    "cold": f"benchmark.py --fast {GPT2} --measured-steps 30",
    "warm": f"benchmark.py --fast {GPT2} --measured-steps 31",
    "profile-gpt2": f"benchmark.py --fast {GPT2} {PROFILE}",
    "profile-xl-fp8": f"benchmark.py --fast --fp8 {XL} {PROFILE}",
    # so few steps of warm-up that none is a graph: operators and shapes of each kernel are seen
    "eager-gpt2": f"benchmark.py --fast {GPT2} {PROFILE} --warmup-steps 3",
    "profile-2.7B-fp8": f"benchmark.py --fast --fp8 {LARGEST} {PROFILE}",
    "xl-fp8": f"benchmark.py --fast --fp8 {XL} --measured-steps 30",
}
IMPORTS = (
    "import cs336.measure.run, cs336.model.fast.model, "
    "cs336.model.fast.feed_forward_kernel, cs336.model.fast.attention_kernel"
)


def main(out: Path, seconds: float) -> None:
    """Run the commands one after the other, each with its output in a file of its own."""
    caches = Path("/tmp/cs336-caches")
    places = {"XDG_CACHE_HOME": "", "TRITON_CACHE_DIR": "triton", "QUACK_CACHE_DIR": "quack"}
    environment = os.environ | {name: str(caches / place) for name, place in places.items()}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(caches / "inductor")
    began = time.monotonic()
    for name, line in COMMANDS.items():
        left_s = seconds - (time.monotonic() - began)
        if left_s < 10:
            print(f"{name}: left out", flush=True)
            continue
        command = ["timeout", f"{left_s:.0f}", sys.executable, *line.split()]
        command += ["--output", str(out / name)]
        start = time.monotonic()
        with (out / f"{name}.txt").open("w") as log:
            done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        print(f"{name}: status {done.returncode}, {time.monotonic() - start:.1f} s", flush=True)
        if name == "warm":
            command = [sys.executable, "-X", "importtime", "-c", IMPORTS]
            with (out / "imports.txt").open("w") as log:
                subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
