"""Runs the commands that need no PyTorch, in the current directory, by the program that is
installed: `python -P tests/outside.py`. Exit status 1: a command failed, or PyTorch was imported.
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ROOT / "data" / "published"
TRACE = ROOT / "tests" / "analysis" / "kernels" / "two_gpus" / "rank1_ddp.json.gz"
SNAPSHOT = min((PUBLISHED / "memory_profiles" / "h200" / "examples").glob("*.pickle"))
SWEEP = PUBLISHED / "e2e_benchmark" / "split_xl"
COMMANDS: tuple[Sequence[str], ...] = (
    ("--help",),
    ("kernels", str(TRACE)),
    ("memory", str(SNAPSHOT)),
    ("report", str(SNAPSHOT)),
    ("report", "sweep"),
    ("account", "--size", "gpt2-xl", "--mixed-precision", "--attention", "sdpa"),
    ("plan", "--size", "8B", "--tokens", "1T", "--gpus", "8xH100"),
)


def run_all(commands: Sequence[Sequence[str]] = COMMANDS) -> int:
    """Run the commands one after the other in this process."""
    from cs336 import cli, start  # noqa: F401 (what the installed command imports first)

    shutil.copytree(SWEEP, "sweep")
    failed = []
    for words in commands:
        print("$ cs336", *words, flush=True)
        try:
            status = cli.main(words)
        except SystemExit as end:  # as --help does
            status = end.code or 0
        if status:
            failed.append(f"cs336 {' '.join(words)}: exit status {status}")
    if "torch" in sys.modules:
        failed.append("PyTorch was imported")
    print(*failed, sep="\n", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(run_all())
