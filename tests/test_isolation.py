"""What the fork server has imported for its workers, in a process of its own: the one of the tests may be running."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys

from cs336_systems.isolation import ensure_fork_server, fork_server, preload_compiler


def worker(connection):
    connection.send(("torch" in sys.modules, "torch._inductor.compile_fx" in sys.modules))


if __name__ == "__main__":
    if sys.argv[1] == "compiler":
        preload_compiler()
    ensure_fork_server()
    here, there = fork_server().Pipe()
    process = fork_server().Process(target=worker, args=(there,))
    process.start()
    print(here.recv())
    process.join()
"""


def test_the_compiler_is_imported_for_those_who_ask(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for asked, found in (("compiler", "(True, True)\n"), ("nothing", "(True, False)\n")):
        done = subprocess.run([sys.executable, str(script), asked], capture_output=True, text=True, timeout=120)
        assert (done.stdout, done.returncode) == (found, 0), done.stderr
