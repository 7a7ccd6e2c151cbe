"""Differences that are choices: one table for all judges, each with its reason."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["DOCUMENTED", "UNINITIALISED", "Difference", "reason_of"]


@dataclass(frozen=True)
class Difference:
    """A difference that is meant; patterns match the whole text.

    Attributes:
      judge: Its name.
      case: A pattern of names of cases.
      why: A pattern of what differs.
      reason: Why that is right, or cannot be otherwise.
      device: A pattern of devices.
      where: A pattern of what was compared.
    """

    judge: str
    case: str
    why: str
    reason: str
    device: str = ".*"
    where: str = ".*"


DOCUMENTED: tuple[Difference, ...] = ()

# Ops whose results are memory that nobody has written: dtype, shape and strides are compared, values are not.
UNINITIALISED = frozenset(
    {
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    }
)


def reason_of(judge: str, case: str, device: str, where: str, why: str) -> str | None:
    """The reason of a documented difference, or None."""
    for one in DOCUMENTED:
        pairs = ((one.case, case), (one.device, device), (one.where, where), (one.why, why))
        if one.judge == judge and all(re.fullmatch(pattern, text, re.DOTALL) for pattern, text in pairs):
            return one.reason
    return None
