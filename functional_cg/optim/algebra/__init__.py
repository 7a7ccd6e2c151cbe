"""What optimizers are made of: pure pairs of functions, how they combine, and the numbers that they read."""
