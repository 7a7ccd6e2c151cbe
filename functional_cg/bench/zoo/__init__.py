"""Trains the models of installed libraries, each as its users would: ``python -m functional_cg.bench.zoo``."""
