"""`python -m tools.convert` in a checkout is `megarlhf convert`; megarlhf/convert/ has the converter."""
