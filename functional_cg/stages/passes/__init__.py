"""Passes over a program: each keeps the results; docstrings state gain and limits."""
