"""A call of a step, taken apart: states, inputs, static arguments; their layout, the buffers they are copied to.

Comes in: ``args, kwargs``. Goes out: a ``Call``. Next room: ``stages.trace`` at the first call, ``stages.run`` later.
"""
