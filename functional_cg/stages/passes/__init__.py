"""Passes over a program or its FX graph: each keeps the results; docstrings state gain and limits."""
