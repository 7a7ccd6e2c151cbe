"""Optimizers by name, from ``sgd`` to ``muon``, and the ``scale_by_*`` links behind them."""
