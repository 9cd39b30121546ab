"""RLHF on Megatron-core, for people who train under Slurm. Start reading at `train/online.py`."""

__version__ = "0.1.0"
