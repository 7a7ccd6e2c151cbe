"""Example programs to run and to copy from; they use only the public API."""
