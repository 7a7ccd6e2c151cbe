"""Benchmarks one training step across several systems: ``python -m tests.bench``."""
