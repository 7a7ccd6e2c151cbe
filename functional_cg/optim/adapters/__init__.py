"""Optimizer classes of torch and other libraries as pure transformations, if they walk the same way."""
