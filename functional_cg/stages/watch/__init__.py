"""The host watch: what the user's Python reads while it is traced, found again and compared at each later call."""
