"""Single tensors and ops: which memory they share, what an op writes, and the Triton kernels of the package."""
