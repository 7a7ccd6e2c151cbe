"""Texts of errors and reports: the user's line, what it asks for, a fix, numbers and HTML."""
