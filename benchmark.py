"""Time one training step of a Transformer language model: forward, backward, optimizer.

python benchmark.py                                            # this machine's default
python benchmark.py --size small --context-length 512 --mixed-precision
nsys profile --trace=cuda,nvtx python benchmark.py             # the named ranges need no flag
python benchmark.py --help
"""

import sys

from cs336.start import main

if __name__ == "__main__":
    sys.exit(main("benchmark"))
