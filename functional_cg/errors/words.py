"""The text of an exception of the user's, which may be any object."""

from __future__ import annotations

__all__ = ["words_of"]


def words_of(error: BaseException) -> str:
    """Return ``str(error)``; if that raises itself, what Python's own traceback shows instead.

    Example:
      >>> from functional_cg.errors.words import words_of
      >>> class Broken(Exception):
      ...     def __str__(self): return self.code
      >>> words_of(ValueError("no")), words_of(Broken())
      ('no', '<exception str() failed>')
    """
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"
