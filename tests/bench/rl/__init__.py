"""Updates of reinforcement learning, each written twice: as a pure step, and in place with ``torch.optim``."""
