"""Records where the time of `--fast` goes: its start, with caches cold and warm, and the kernels of
a few steps.

`python tests/gpu/fast_start.py OUT SECONDS` begins no further command after so many seconds. With
names of COMMANDS after that it runs these only. At the end it prints what each run has waited for,
in a table. It measures the checkout in the working directory: two are compared by two calls.
"""

import json
import os
import statistics
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
    "warm-again": f"benchmark.py --fast {GPT2} --measured-steps 32",
    "compiled": f"benchmark.py --fast --compile default {GPT2} --measured-steps 30",
    "compiled-again": f"benchmark.py --fast --compile default {GPT2} --measured-steps 31",
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
SUMS = "sum", "step (ms)", "peak (GiB)"
"""The last rows of the table."""
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


def print_waits(out: Path) -> None:
    """Print the seconds of each part of each run's start, their sum, the median step and the
    peak of memory.
    """
    waits: dict[str, dict[str, float]] = {}
    for path in sorted(out.glob("*/*/single/runs/*.json")):
        record = json.loads(path.read_text())
        parts = {wait["what"]: wait["seconds"] for wait in record["durations"]["waits"]}
        times = {row["phase"]: row["times_s"] for row in record["measurements"]}
        parts["sum"] = sum(parts.values())
        parts["step (ms)"] = 1000 * statistics.median(times["step"])
        parts["peak (GiB)"] = (record["memory"] or {}).get("peak_allocated_bytes", 0) / 2**30
        waits[path.relative_to(out).parts[0]] = parts
    names = dict.fromkeys(name for parts in waits.values() for name in parts)
    print(f"{'':32}" + "".join(f"{run:>16}" for run in waits))
    for name in sorted(names, key=SUMS.__contains__):
        row = [parts.get(name) for parts in waits.values()]
        print(f"{name:32}" + "".join(f"{'':>16}" if s is None else f"{s:16.2f}" for s in row))


def main(out: Path, seconds: float, names: list[str]) -> None:
    """Run the commands one after the other, each with its output in a file of its own."""
    out.mkdir(parents=True, exist_ok=True)
    caches = out.absolute() / "caches"
    places = {"XDG_CACHE_HOME": "", "TRITON_CACHE_DIR": "triton", "QUACK_CACHE_DIR": "quack"}
    environment = os.environ | {name: str(caches / place) for name, place in places.items()}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(caches / "inductor")
    began = time.monotonic()
    for name in names or COMMANDS:
        line = COMMANDS[name]
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
    print_waits(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
