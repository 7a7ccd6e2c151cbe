"""The trace stage: run the user's function on fake tensors, record its ATen calls in a ``Program``.

Input: a ``Recipe``. Output: a ``Program`` and a ``HostWatch``, or an error that names the user's line.
"""
