"""What ``help()`` shows of a public class: what its users call, in two screens."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Iterable
from types import MemberDescriptorType

__all__ = ["Documented"]


class Documented(ABCMeta):
    """Metaclass of public classes: ``dir(cls)``, and so ``help(cls)``, lists the methods that the class brings.

    What Python or torch puts on a class is left out, as are fields, which the docstring has, and methods of a base that
    has a page of its own; but class methods, which make objects, are listed. Instances are not concerned.

    Example:
      >>> from functional_cg.manual import Documented
      >>> class Refused(ValueError, metaclass=Documented):
      ...     def fix(self): ...
      >>> class Late(Refused):
      ...     def wait(self): ...
      >>> dir(Refused), dir(Late)
      (['fix'], ['wait'])
    """

    def __dir__(cls) -> Iterable[str]:
        return [name for name in super().__dir__() if _is_listed(cls, name)]


def _is_listed(cls: type, name: str) -> bool:
    """Whether the page of a class lists an attribute."""
    if name.startswith("_") and name != "__call__":
        return False
    owners = [one for one in cls.__mro__ if name in vars(one)]
    if not owners or any(one.__module__.partition(".")[0] in ("builtins", "torch") for one in owners):
        return False
    value = vars(owners[0])[name]
    if isinstance(value, classmethod):
        return True
    elsewhere = any(isinstance(one, Documented) for one in owners if one is not cls)
    is_field = isinstance(value, (MemberDescriptorType, property))
    return hasattr(value, "__get__") and not is_field and not elsewhere
