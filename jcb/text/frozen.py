"""JSON-like values that a template can read but not change (minijinja calls the methods of Python objects)."""

from __future__ import annotations

from typing import Any


def freeze(value: Any) -> Any:
    """A copy of `value` with every list and dict frozen, at any depth."""
    if isinstance(value, dict):
        return FrozenDict((key, freeze(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return FrozenList(map(freeze, value))
    return value


def _refuse(*args: object, **kwargs: object) -> Any:
    raise TypeError("a template must not change what it is given")


class FrozenDict(dict):
    """A dict whose own methods do not change it."""

    clear = pop = popitem = setdefault = update = _refuse
    __setitem__ = __delitem__ = __ior__ = _refuse

    def copy(self) -> FrozenDict:
        """Itself, since a plain dict could be changed."""
        return self


class FrozenList(list):
    """A list whose own methods do not change it."""

    append = clear = extend = insert = pop = remove = reverse = sort = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def copy(self) -> FrozenList:
        """Itself, since a plain list could be changed."""
        return self
