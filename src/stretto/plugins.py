"""Classes by name: stretto's own, and those that installed packages add."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar, final

from stretto.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.metadata import EntryPoint, EntryPoints


class _Named(Protocol):
    name: ClassVar[str]


_Class = TypeVar("_Class")
_NamedClass = TypeVar("_NamedClass", bound=_Named)


@final
class ClassRegistry(Generic[_NamedClass]):
    """The classes of one kind by name, stretto's own before installed ones."""

    def __init__(
        self,
        group: str,
        base: type[_NamedClass],
        own: Iterable[type[_NamedClass]],
    ) -> None:
        """Register stretto's own classes.

        Args:
            group: The entry points by which packages add classes.
            base: The contract that all classes implement.
            own: stretto's classes.
        """
        self._group = group
        self._base = base
        self.own = {each.name: each for each in own}
        """stretto's classes by name."""

    def names(self) -> tuple[str, ...]:
        """Return the names of all classes."""
        return (*self.own, *installed_names(self._group, besides=self.own))

    def find(self, name: str) -> type[_NamedClass] | None:
        """Return the class of a name, or ``None`` if no package has it.

        Raises:
            SpecError: an installed package's class does not load.
        """
        return self.own.get(name) or load_class(self._group, name, self._base)


def installed_names(group: str, *, besides: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the sorted names of a group's entry points, without some."""
    return tuple(sorted(_entry_points(group).names.difference(besides)))


def load_class(group: str, name: str, base: type[_Class]) -> type[_Class] | None:
    """Return the class that an entry point names, or ``None`` without such an entry.

    Args:
        group: The entry points' group, for instance ``stretto.planners``.
        name: The entry point's name, which is also the class's ``name``.
        base: The contract that the class implements.

    Raises:
        SpecError: several packages have the entry point, it does not load, or it is
            not a concrete subclass of ``base`` of that name.
    """
    found = list(_entry_points(group).select(name=name))
    if not found:
        return None
    if len(found) > 1:
        packages = ", ".join(sorted(map(_package_of, found)))
        raise SpecError(
            f"{group}: {name!r} is an entry point of several packages ({packages}): "
            "uninstall all but one"
        )
    where = f"{group}: entry point {name!r} of {_package_of(found[0])}"
    try:
        value = found[0].load()
    except Exception as exc:
        why = f"{type(exc).__name__}: {exc}"
        raise SpecError(f"{where} cannot be loaded: {why}") from exc
    if not (inspect.isclass(value) and issubclass(value, base)):
        raise SpecError(f"{where} must be a subclass of {base.__name__}, got {value!r}")
    missing: Iterable[str] = getattr(value, "__abstractmethods__", ())
    if missing:
        names = ", ".join(sorted(missing))
        raise SpecError(f"{where}: {value.__name__} must implement {names}")
    if getattr(value, "name", None) != name:
        raise SpecError(
            f"{where}: {value.__name__}.name must be {name!r}, got "
            f"{getattr(value, 'name', None)!r}"
        )
    return value


def _entry_points(group: str) -> EntryPoints:
    # Imported late: it would cost every command 15 ms, and few need installed classes.
    from importlib.metadata import entry_points

    return entry_points(group=group)


def _package_of(entry: EntryPoint) -> str:
    """Return the name of the package that brings an entry point."""
    return "an unnamed package" if entry.dist is None else entry.dist.name
