"""Helpers of the notebooks: plots, data, and launching functions on several ranks."""
