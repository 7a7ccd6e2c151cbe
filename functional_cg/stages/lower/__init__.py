"""Lower a program with a compiler: the FX graph, the interface to inductor, and the cost of a call.

The plan that runs ATen calls one by one is in ``stages.plan``.
"""
