"""What ranks make sure of before a capture: that they are about to do the same, or what fits together."""
