"""Measuring starts, locks and kills processes as POSIX systems do. Reading files and planning need
none of that, so these work on Windows too.
"""

import os

IS_POSIX = hasattr(os, "fork")
"""Whether this system has the calls that measuring needs: Linux, macOS and WSL do."""
LACKING = "measuring needs Linux or macOS: on Windows, run the same command in WSL"
"""What to say to whoever measures elsewhere."""
