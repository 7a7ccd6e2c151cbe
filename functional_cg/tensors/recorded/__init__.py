"""Functions of torch that read values on the host, or take functions: the same by calls that a trace can record."""
