"""Rewrites of a program or of its FX graph: each keeps the results, and says what it wins and when it stays out."""
