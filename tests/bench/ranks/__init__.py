"""Benches of several ranks: pipelines, and saves that training waits for."""
