"""Benchmarks one training step across several systems: ``python -m functional_cg.bench``."""
