"""The memory of a state: plan and allocate it, expose it by handles and read-only leaves, convert shards.

Input: a pytree of tensors. Output: a ``Handle``, whose slots ``call`` and ``stages`` know. Next: ``call``.
"""
