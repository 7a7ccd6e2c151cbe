"""The update rules by name, from ``sgd`` to ``muon``, and the links that compute them."""
