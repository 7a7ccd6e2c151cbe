"""Run independent calls of a step side by side, in one graph: a plan's calls, spread over lanes.

A plan's units of work come in (``units``), with what they read and write. ``listing`` says which unit runs on which
lane and when, and what waits for what, ``choice`` whether that pays, and ``races`` refuses the result unless each two
units that touch the same memory are ordered. Of a program with collectives, ``order`` chooses the order in the same
way. ``source`` writes the code of a plan, and sees whether memory is where the units say. The units of ATen calls are
those of ``stages.plan``; those of a compiled function, ``launches`` records by a run on fake tensors. Next is
``stages.run``, where a lane is a stream.
"""
