"""A step as an object: what was lowered and captured, for which call; eager runs, verification, explanations.

Everything comes together here: ``captures`` takes a call through all stages and keeps what they made.
"""
