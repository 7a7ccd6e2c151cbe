"""Stress tests of threads, signals, forks, killed ranks and damaged checkpoints, for any length of time.

``python -m tests.stress`` runs the long versions and prints what it has counted; the test suite runs short ones. Each
function returns its counts, and raises ``AssertionError`` at the first value that is of two generations, mode that
stays on, or process that hangs.
"""
