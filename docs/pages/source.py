"""What the package's source says beside its code: fields, the strings below them, docstrings."""

import ast
import inspect
from functools import cache
from pathlib import Path

from pages.markdown import code, grid


@cache
def tree(path: Path) -> ast.Module:
    """A file's syntax."""
    return ast.parse(path.read_text())


def class_node(kind: type) -> ast.ClassDef:
    """The syntax of a class."""
    nodes = tree(Path(inspect.getfile(kind))).body
    return next(node for node in nodes if isinstance(node, ast.ClassDef) and node.name == kind.__name__)


def fields(kind: type) -> dict[str, tuple[str, str, str]]:
    """The fields of a class in order: type, default, and the string that stands below it."""
    found: dict[str, tuple[str, str, str]] = {}
    last = ""
    for node in class_node(kind).body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)):
                default = ast.unparse(node.value) if node.value is not None else ""
                last, found[name] = name, (ast.unparse(node.annotation), default, "")
            case ast.Assign(targets=[ast.Name(id=name)]):
                last, found[name] = name, ("", ast.unparse(node.value), "")
            case ast.Expr(value=ast.Constant(value=str(text))) if last:
                found[last] = (*found[last][:2], inspect.cleandoc(text))
            case _:
                last = ""
    return found


def members(kind: type) -> list[str]:
    """An enumeration as a table."""
    rows = [(code(ast.literal_eval(value)), doc) for _, value, doc in fields(kind).values()]
    return grid(("value", "meaning"), rows)


def summary(kind: type) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(kind) or "").partition("\n")[0]


def docstring(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """A docstring, its sections as lists."""
    lines, result, inside = (ast.get_docstring(node) or "").splitlines(), [], False
    for line in lines:
        inside = (inside and line.startswith("    ")) or line in ("Args:", "Attributes:", "Raises:")
        is_item = inside and line.startswith("    ") and not line.startswith("     ")
        result.append(f"- {line.strip()}" if is_item else line.strip() if inside else line)
    return "\n".join(result)
