"""Trains the models of installed libraries, each as its users would: ``python -m tests.bench.zoo``."""
