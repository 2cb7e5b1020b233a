"""What low precision does to a sum, and what autocast does to a model: two tables, observed on this
machine.

    python precision.py
    python precision.py --device cuda
    python precision.py --output data/precision

First table: 0.01 added a thousand times. Every addition rounds the sum to its own type, and the
larger the sum, the coarser the rounding: so matrix products keep their sums in fp32 even where
their factors are fp16 or bf16, and so does a loss that is averaged over a batch. Storing 0.01 costs
something too, but only once, not a thousand times; the table tells the two errors apart. bf16 has
the range of fp32 with 8 bits of precision, fp16 has 11 bits and a narrow range.

Second table: the data types under `torch.autocast`, which leaves the parameters in fp32 and chooses
a type for each operation: low precision for matrix products, fp32 where precision matters. Which
operations are which depends on the device. Nothing here comes from a list: hooks on the modules,
the operations as PyTorch dispatches them, and the gradients themselves say what they are.
"""

import sys

from cs336.start import main

if __name__ == "__main__":
    sys.exit(main("precision"))
