"""From a function to a graph, in order: ``trace``, ``passes``, ``lower``, ``trial``, ``run``.

Two data structures are handed on: a ``Program`` (``program``) and an ``ExecutionPlan`` (``plan``).
"""
