"""Time a grid of training steps, each in a fresh process, and write tables and plots.

python benchmark_sweep.py                                      # this machine's default grid
python benchmark_sweep.py --precisions fp32 bf16               # with a speed-up column
python benchmark_sweep.py --warmup-steps 0 1 2 5 --sizes small # a warm-up study
python benchmark_sweep.py --help
"""

import sys

from cs336.start import main

if __name__ == "__main__":
    sys.exit(main("sweep"))
