"""The memory of a state: planned, allocated, handed out as read-only leaves and handles, and crossed by shards.

Comes in: a pytree of tensors. Goes out: a ``Handle``, whose slots ``call`` and ``stages`` know. Next room: ``call``.
"""
