"""Split a call of a step into states, inputs and static arguments; check and stage the inputs.

Input: ``args, kwargs``. Output: a ``Call``. Next: ``stages.trace`` at the first call, ``stages.run`` later.
"""
