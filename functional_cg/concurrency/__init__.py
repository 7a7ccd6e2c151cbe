"""Streams, signals and threads: whose turn it is, and what must not be interrupted."""
