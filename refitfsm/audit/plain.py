"""The model's values as plain data and back: what a journal holds.

NamedTuples become objects keyed by field name, so that a journal can be read by people and by other
programs; sets become sorted lists. `build` is strict: a missing, unknown or ill-typed field is refused.
"""

import types
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from typing import TypeVar, Union, cast, get_args, get_origin, get_type_hints

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]

T = TypeVar("T")


def plain(value: object) -> Plain:
    """A value of the model as data that JSON can hold.

    Raises:
        TypeError: it is no value of the model.
    """
    return _converter(type(value))(value)  # type: ignore[arg-type]


_SCALARS = (type(None), bool, int, float, str)


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
        return lambda value: {
            name: item if type(item) in _SCALARS else plain(item)
            for name, item in zip(names, cast("tuple[Plain, ...]", value), strict=True)
        }
    if issubclass(kind, tuple):
        return lambda value: [plain(item) for item in cast("tuple[object, ...]", value)]
    raise TypeError(f"{kind.__name__} is no value of the model")


def build(kind: type[T], data: object) -> T:
    """A value of the model from plain data.

    Raises:
        ValueError: the data is not of that kind; the message names the field.
    """
    return cast("T", _builder(kind)(data))  # type: ignore[arg-type]


Builder = Callable[[object], object]


@cache
def _builder(kind: object) -> Builder:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        inner = _builder(next(item for item in arguments if item is not type(None)))
        return lambda data: None if data is None else inner(data)
    if origin is frozenset:
        item = _builder(arguments[0])
        return lambda data: frozenset(item(entry) for entry in _list(data))
    if origin is tuple:
        return _tuple_builder(arguments)
    if isinstance(kind, type) and hasattr(kind, "_fields"):
        return _record_builder(kind)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind
    if isinstance(kind, type):
        return _scalar_builder(kind)
    raise TypeError(f"{kind} is no kind of the model")


def _list(data: object) -> list[object]:
    if not isinstance(data, list):
        raise ValueError(f"a list is wanted, not {type(data).__name__}")  # noqa: TRY004 - bad data, not a bad call
    return data


def _tuple_builder(arguments: tuple[object, ...]) -> Builder:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        item = _builder(arguments[0])
        return lambda data: tuple(item(entry) for entry in _list(data))
    items = [_builder(argument) for argument in arguments]
    return lambda data: tuple(make(entry) for make, entry in zip(items, _list(data), strict=True))


def _scalar_builder(kind: type) -> Builder:
    def build_scalar(data: object) -> object:
        if kind is float and type(data) is int:
            return float(data)
        if type(data) is not kind:
            raise ValueError(f"{kind.__name__} is wanted, not {type(data).__name__}")
        return data

    return build_scalar


def _record_builder(kind: type) -> Builder:
    hints = get_type_hints(kind)
    builders = {name: _builder(hints[name]) for name in kind._fields}  # type: ignore[attr-defined]

    def build_record(data: object) -> object:
        if not isinstance(data, dict) or data.keys() != builders.keys():
            raise ValueError(f"{kind.__name__} wants the fields {', '.join(builders)}")
        values = []
        for name, make in builders.items():
            try:
                values.append(make(data[name]))
            except ValueError as error:
                raise ValueError(f"{kind.__name__}.{name}: {error}") from None
        return kind(*values)

    return build_record
