"""Texts of errors and reports: the user's line, what it asks for, what to write instead, numbers and HTML."""
