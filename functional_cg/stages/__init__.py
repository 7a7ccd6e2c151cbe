"""From a function to a graph, in order: ``trace``, ``passes``, ``lower``, ``trial``, ``run``.

Two data structures pass between them: a ``Program`` (``program``) and an ``Plan`` (``plan``).
"""
