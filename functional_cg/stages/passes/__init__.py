"""Passes over a program or its FX graph: each keeps the results, and documents its gain and when it applies."""
