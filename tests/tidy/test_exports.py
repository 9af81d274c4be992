"""The public names: all there, in order, documented, and with types that say something."""

import ast
import inspect
from collections.abc import Iterator

import refitfsm
from tests.tidy.tree import PACKAGE, Function, parsed, python_files, shown

VALUES = frozenset({"__version__"})
"""Exported names that are no classes or functions."""


def exported() -> Iterator[tuple[str, object]]:
    return ((name, getattr(refitfsm, name)) for name in refitfsm.__all__ if name not in VALUES)


def test_exports_are_sorted_and_given_once() -> None:
    """`__all__` is in order and has no name twice."""
    assert list(refitfsm.__all__) == sorted(set(refitfsm.__all__))


def test_exports_exist() -> None:
    """Every name in `__all__` can be imported."""
    missing = [name for name in refitfsm.__all__ if not hasattr(refitfsm, name)]
    assert missing == []


def test_exports_are_documented() -> None:
    """Every exported class or function has a docstring of its own, and so have its public methods."""
    bare = []
    for name, value in exported():
        assert isinstance(value, type) or callable(value)
        text = value.__doc__ or ""
        if not text or text.startswith(f"{name}("):  # what NamedTuple writes by itself
            bare.append(name)
        if isinstance(value, type):
            bare += [f"{name}.{method}" for method in _undocumented_methods(value)]
    assert bare == []


def _undocumented_methods(kind: type) -> Iterator[str]:
    for name, member in vars(kind).items():
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        mine = inspect.isfunction(function) and function.__module__.startswith("refitfsm")
        if mine and not name.startswith("_") and not function.__doc__:
            yield name


def _public_annotations(node: ast.AST) -> Iterator[tuple[str, int, ast.expr]]:
    """The annotations of public functions, methods and fields below a module or class."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.ClassDef(name=name) if not name.startswith("_"):
                yield from _public_annotations(child)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if not child.name.startswith("_") or child.name == "__init__":
                    yield from _signature(child)
            case ast.AnnAssign(target=ast.Name(id=name)) if not name.startswith("_"):
                yield name, child.lineno, child.annotation


def _signature(node: Function) -> Iterator[tuple[str, int, ast.expr]]:
    given = node.args
    everything = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    for argument in everything:
        if argument is not None and argument.annotation is not None:
            yield f"{node.name}({argument.arg})", argument.lineno, argument.annotation
    if node.returns is not None:
        yield f"{node.name} ->", node.lineno, node.returns


def _says_any(annotation: ast.expr) -> bool:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    return any(
        (isinstance(node, ast.Name) and node.id == "Any")
        or (isinstance(node, ast.Attribute) and node.attr == "Any")
        for node in ast.walk(annotation)
    )


def test_no_public_signature_says_any() -> None:
    """A public function, method or field says what it takes and gives; `Any` says nothing."""
    vague = [
        f"{shown(path)}:{line} {name}"
        for path in python_files(PACKAGE)
        for name, line, annotation in _public_annotations(parsed(path))
        if _says_any(annotation)
    ]
    assert vague == []
