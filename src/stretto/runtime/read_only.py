"""Values of a model that programs read, and whose names they may use themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, final, overload

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


@final
class shown_value(Generic[_T]):  # noqa: N801 - used like `property`
    """A property that an instance's attribute of the same name hides.

    Programs set attributes of their own on a DDP model. A `property` without a setter
    would refuse its name, where DDP accepts any. The library itself reads the value
    under another name.
    """

    def __init__(self, get: Callable[[Any], _T]) -> None:
        self._get = get
        self.__doc__ = get.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> _T: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Self | _T:
        """Return the value for an instance, or this object for the class."""
        return self if instance is None else self._get(instance)
