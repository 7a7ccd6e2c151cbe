"""Where the time and the memory of a step go, by module and by line; the public face is ``step.profile``."""
