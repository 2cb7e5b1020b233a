"""A sweep on a Ray cluster: every run is a task of Ray, and this process alone writes records.

Ray places the tasks, starts a task whose machine dies on another one, and brings back what a task
returns: plain bytes, which are a `Reply` in MessagePack. A task measures as a local sweep does, in
a fresh process that a fork server starts; that process does not load Ray.
"""

import os

# Ray reads them when it is imported; without the second, a run for which memory is too small would
# have endless tries
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_task_oom_retries": "0"}
