"""Checkpoint conversion: `python -m tools.convert --help`. See convert.py for the whole, families/ for the tables."""
