"""What surrounds a call: torch's modes, the default device, autocast; what is set aside and what is refused."""
