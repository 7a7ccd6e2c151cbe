"""The first stage: run the user's function on fake tensors, and record each ATen call as a ``Program``.

Comes in: a ``Recipe``. Goes out: a ``Program`` and a host watch, or an error that names the user's line.
"""
