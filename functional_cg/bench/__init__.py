"""The comparison with peers: the same training step through several systems, ``python -m functional_cg.bench``."""
