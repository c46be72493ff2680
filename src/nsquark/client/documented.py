"""Copies docstrings of methods that several classes have in common, so that they are written once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

C = TypeVar("C", bound=type)


def documented_like(model: type) -> Callable[[C], C]:
    """Gives the methods and properties of a class that have no docstring those of the model's with the same names."""

    def document(kind: C) -> C:
        for name, member in list(vars(kind).items()):
            doc = getattr(getattr(model, name, None), "__doc__", None)
            if name.startswith("_") or not doc or getattr(member, "__doc__", None):
                continue
            if isinstance(member, property):
                setattr(kind, name, property(member.fget, member.fset, member.fdel, doc))
            elif callable(member):
                member.__doc__ = doc
        return kind

    return document
