"""Checkpoint conversion: `megarlhf convert --help`. convert.py has the conversions, families/ the tables."""
