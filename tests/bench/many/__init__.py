"""Runs of the bench that take several processes: first calls, filled caches, and what many workloads add up to."""
