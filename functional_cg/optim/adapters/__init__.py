"""Adapts optimizer classes from torch and other libraries, after checking that both take the same steps."""
