"""How a check says what it wants. `assert` would be silent under `python -O`."""

from collections.abc import Mapping


class Broken(Exception):
    """The server did something else than the law says. The message says what."""


class NotHere(Exception):
    """The check cannot be made on this server; the message says why."""


def expect(holds: object, what: str) -> None:
    """Raise `Broken` unless it holds."""
    if not holds:
        raise Broken(what)


def same(found: object, wanted: object, what: str = "it") -> None:
    """Raise `Broken` unless the two are equal."""
    if found != wanted:
        raise Broken(f"{what} is {found!r:.300}, and not {wanted!r:.300}")


def differ(found: object, other: object, what: str) -> None:
    """Raise `Broken` if the two are equal."""
    if found == other:
        raise Broken(f"{what}: both are {found!r:.300}")


def mapping(value: object) -> Mapping[str, object]:
    """A JSON object.

    Raises:
        Broken: it is something else.
    """
    if not isinstance(value, dict):
        raise Broken(f"{value!r:.300} is no JSON object")
    return value


def listing(value: object) -> list[object]:
    """A JSON array.

    Raises:
        Broken: it is something else.
    """
    if not isinstance(value, list):
        raise Broken(f"{value!r:.300} is no JSON array")
    return value
