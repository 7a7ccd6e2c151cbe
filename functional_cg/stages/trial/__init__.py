"""Certify a compiled plan: compare it with its program on real values before it commits anything."""
