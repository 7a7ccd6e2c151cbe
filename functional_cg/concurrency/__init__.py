"""Streams, signals and threads: mutual exclusion, and blocks that must not be interrupted."""
