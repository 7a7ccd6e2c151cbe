"""Pytrees below ``fcg.tree``: dataclasses as nodes, trees without leaves, when two Python values are the same."""
