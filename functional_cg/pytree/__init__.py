"""What ``fcg.tree`` builds on: dataclass nodes, treedefs, and exact equality of Python values."""
