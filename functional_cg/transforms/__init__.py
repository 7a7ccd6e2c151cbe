"""Functions for use inside a step: gradients, control flow, rematerialization, taps and prints."""
