"""Measurements; run as modules from the root of the repository, such as ``python -m benchmarks.step``."""
