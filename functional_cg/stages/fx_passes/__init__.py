"""Passes over the FX graph that inductor gets, and inside of inductor."""
