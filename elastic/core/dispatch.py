"""A method with an implementation for each type of event, cheap enough for every event."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_type_hints

R = TypeVar("R")


class by_event(Generic[R]):  # noqa: N801 - a decorator
    """As functools.singledispatchmethod, for exact types only: that builds a function anew at
    each call, which took a tenth of a machine's time. The decorated method is the fallback."""

    def __init__(self, fallback: Callable[..., R]) -> None:
        implementations: dict[type, Callable[..., R]] = {}

        def dispatch(machine: Any, event: Any, now: float) -> R:
            return implementations.get(type(event), fallback)(machine, event, now)

        self._implementations, self._dispatch = implementations, dispatch

    def register(self, method: Callable[..., R]) -> Callable[..., R]:
        """Implements it for the type that `method` annotates its argument `event` with."""
        self._implementations[get_type_hints(method)["event"]] = method
        return method

    def __set_name__(self, owner: type, name: str) -> None:
        setattr(owner, name, self._dispatch)  # a method as any other from here on

    if TYPE_CHECKING:

        def __get__(self, machine: Any, owner: type | None = None) -> Callable[..., R]: ...
