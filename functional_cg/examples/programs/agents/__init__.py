"""Programs of reinforcement learning."""
