"""Settings around a call: torch's modes, the default device, autocast; which to override, which to refuse."""
