"""Ray's program of this name, which sets variables and becomes a process of a task, without
importing Ray for that.
"""

import json
import os
import sys

CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="

context = next(word for word in sys.argv if word.startswith(CONTEXT)).removeprefix(CONTEXT)
os.environ |= {
    name: os.path.expandvars(value) for name, value in json.loads(context)["env_vars"].items()
}
os.execv(
    sys.executable,
    [sys.executable, *(w for w in sys.argv[1:] if not w.startswith((CONTEXT, LANGUAGE)))],
)
