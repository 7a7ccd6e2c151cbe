"""The host watch: record what the user's Python reads during a trace, and compare it at each call."""
