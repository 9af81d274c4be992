"""The model's values as plain data and back: what a journal holds.

NamedTuples become objects keyed by field name, so that a journal can be read by people and by other
programs; fields at their defaults are left out; sets become sorted lists. Reading is strict: a missing,
unknown or ill-typed field is refused.
"""

import types
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]

T = TypeVar("T")


def plain(value: object) -> Plain:
    """A value of the model as data that JSON can hold.

    Raises:
        TypeError: it is no value of the model.
    """
    return _converter(type(value))(value)  # type: ignore[arg-type]


_SCALARS = (type(None), bool, int, float, str)
_REQUIRED = object()
"""Equal to no value: a field without a default is always written."""


@cache
def _converter(kind: type) -> Callable[[object], Plain]:
    """How values of one type become plain; looked up once for each type, since every record comes by."""
    if kind in _SCALARS:
        return lambda value: cast("Plain", value)
    if issubclass(kind, str):
        return str.__str__
    if issubclass(kind, frozenset):
        return lambda value: cast("Plain", sorted(map(str, cast("frozenset[object]", value))))
    names = getattr(kind, "_fields", None)
    if names is not None:
        given = kind._field_defaults  # type: ignore[attr-defined]
        defaults = tuple(given.get(name, _REQUIRED) for name in names)
        return lambda value: {
            name: item if type(item) in _SCALARS else plain(item)
            for name, default, item in zip(names, defaults, cast("tuple[Plain, ...]", value), strict=True)
            if item != default
        }
    if issubclass(kind, tuple):
        return lambda value: [plain(item) for item in cast("tuple[object, ...]", value)]
    raise TypeError(f"{kind.__name__} is no value of the model")


def build(kind: type[T], data: object) -> T:
    """A value of the model from plain data.

    Raises:
        ValueError: the data is not of that kind; the message names the field.
    """
    wire = wire_of(kind)  # type: ignore[arg-type]
    return cast("T", wire.make(msgspec.convert(data, wire.kind)))


class Wire(NamedTuple):
    """What msgspec reads for a kind of the model, and how the model's value is made of it."""

    kind: type[object]
    """Or a union or an alias, as in type hints."""
    make: Callable[[object], object]


def _same(value: object) -> object:
    return value


@cache
def wire_of(kind: object) -> Wire:
    """How a kind of the model is read. NamedTuples are found in fields, not in lists and sets."""
    if get_origin(kind) in (types.UnionType, Union):
        inner = wire_of(next(item for item in get_args(kind) if item is not type(None)))
        if inner.make is _same:
            return Wire(cast("type[object]", kind), _same)
        return Wire(
            cast("type[object]", inner.kind | None), lambda data: None if data is None else inner.make(data)
        )
    if isinstance(kind, type) and hasattr(kind, "_fields"):
        return _record_wire(kind)
    return Wire(cast("type[object]", kind), _same)


def tagged_wire(kind: type, tag: str) -> Wire:
    """As `wire_of` a NamedTuple, for one that is told from others by its `kind`, which is `tag`."""
    return _record_wire(kind, tag)


def _record_wire(kind: Any, tag: str | None = None) -> Wire:
    hints, defaults = get_type_hints(kind), kind._field_defaults
    fields: list[Any] = []
    nested: list[tuple[int, Callable[[object], object], object]] = []
    for place, name in enumerate(kind._fields):
        inner = wire_of(hints[name])
        if inner.make is not _same:
            nested.append((place, inner.make, defaults.get(name)))
        if name not in defaults:
            fields.append((name, inner.kind))
        elif inner.make is _same:
            fields.append((name, inner.kind, defaults[name]))
        else:
            fields.append((name, inner.kind | msgspec.UnsetType, msgspec.UNSET))
    struct = msgspec.defstruct(
        kind.__name__, fields, forbid_unknown_fields=True, tag=tag, tag_field=tag and "kind"
    )

    new, parts = tuple.__new__, msgspec.structs.astuple  # `_make` would count the fields once more

    if not nested:
        return Wire(struct, lambda data: new(kind, parts(cast("msgspec.Struct", data))))

    def make(data: object) -> object:
        values = list(parts(cast("msgspec.Struct", data)))
        for place, inner_make, default in nested:
            found = values[place]
            values[place] = default if found is msgspec.UNSET else inner_make(found)
        return new(kind, values)

    return Wire(struct, make)
