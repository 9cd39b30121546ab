"""RLHF on Megatron-core, for people who train under Slurm. Start reading at `train/online.py`."""

import os

__version__ = "0.1.0"

# MKL would keep its buffers of every size of product it meets, some 20 MiB a rank. It looks when torch loads it.
os.environ.setdefault("MKL_DISABLE_FAST_MM", "1")
