"""What users call inside of a step: gradients, loops and choices, rematerialization, taps and prints."""
