"""Checkpoint conversion: `python -m tools.convert --help`. convert.py has the conversions, families/ the tables."""
