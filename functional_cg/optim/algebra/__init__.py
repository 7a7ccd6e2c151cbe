"""Gradient transformations: the interface, the combinators, and the schedules and hyperparameters they read."""
