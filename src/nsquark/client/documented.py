"""Copies docstrings of methods that several classes have in common, so that they are written once."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TypeVar

C = TypeVar("C", bound=type)


def documented_like(model: type) -> Callable[[C], C]:
    """Gives the methods and properties of a class that have no docstring those of the model's with the same names. What
    it inherits without one is copied, since another class may inherit it too and have another model.
    """

    def document(kind: C) -> C:
        for name in dir(kind):
            member = next(vars(base)[name] for base in kind.__mro__ if name in vars(base))
            doc = getattr(getattr(model, name, None), "__doc__", None)
            if name.startswith("_") or not doc or getattr(member, "__doc__", None):
                continue
            if isinstance(member, property):
                setattr(kind, name, property(member.fget, member.fset, member.fdel, doc))
            elif isinstance(member, types.FunctionType):
                own = member if name in vars(kind) else _copied(member)
                own.__doc__ = doc
                setattr(kind, name, own)
        return kind

    return document


def _copied(function: types.FunctionType) -> types.FunctionType:
    copied = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__annotations__ = function.__annotations__
    return copied
