"""Single tensors and ops: shared memory, arguments that ops write, and the GPU kernels of the package."""
