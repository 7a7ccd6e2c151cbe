"""A program becomes a plan that a compiler makes: the FX graph, the door to inductor, and what a call costs.

The plan of ATen calls one by one is ``stages.plan``.
"""
