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
    "stream-gpt2": f"benchmark.py --fast --bf16-stream {GPT2} --measured-steps 31",
    "profile-xl-fp8": f"benchmark.py --fast --fp8 {XL} {PROFILE}",
    "profile-2.7B-fp8": f"benchmark.py --fast --fp8 {LARGEST} {PROFILE}",
    # so few steps of warm-up that none is a graph: operators and shapes of each kernel are seen
    "eager-gpt2": f"benchmark.py --fast {GPT2} {PROFILE} --warmup-steps 3",
    "xl-fp8": f"benchmark.py --fast --fp8 {XL} --measured-steps 30",
    "stream-xl-fp8": f"benchmark.py --fast --fp8 --bf16-stream {XL} --measured-steps 30",
}
AFTER_RECORD_S = 6.0
IMPORTS = (
    "import cs336.measure.run, cs336.model.fast.model, "
    "cs336.model.fast.feed_forward_kernel, cs336.model.fast.attention_kernel"
)


def wait(process: subprocess.Popen[bytes], out: Path, left_s: float) -> int | None:
    """The status of the process; None if it was ended because its time was over, or because it went
    on for AFTER_RECORD_S after its record was there: it explains its profile, which needs no GPU.
    """
    end_s = time.monotonic() + left_s
    while (status := process.poll()) is None and time.monotonic() < end_s:
        if any(out.glob("*/single/runs/*.json")):
            end_s = min(end_s, time.monotonic() + AFTER_RECORD_S)
            try:
                return process.wait(end_s - time.monotonic())
            except subprocess.TimeoutExpired:
                break
        time.sleep(0.1)
    process.terminate()
    process.wait()
    return status


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
        start = time.monotonic()
        command = [sys.executable, *line.split(), "--output", str(out / name)]
        with (out / f"{name}.txt").open("w") as log:
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            status = wait(process, out / name, left_s)
        print(f"{name}: status {status}, {time.monotonic() - start:.1f} s", flush=True)
        if name == "warm":
            command = [sys.executable, "-X", "importtime", "-c", IMPORTS]
            with (out / "imports.txt").open("w") as log:
                subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
