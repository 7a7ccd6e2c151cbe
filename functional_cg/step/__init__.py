"""The step object: lower and capture calls, run eagerly, verify, explain.

All stages meet here: ``captures`` takes a call through each of them and caches the results.
"""
