"""The checkout as data: which files there are, and what Python files say."""

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "refitfsm"
NOT_TEXT = frozenset({".pickle", ".png", ".svg", ".gz", ".xz", ".safetensors"})
LEFT_OUT = frozenset({".git", ".venv", ".cache", ".hypothesis", ".mypy_cache", ".ruff_cache", "__pycache__"})


@cache
def files() -> tuple[Path, ...]:
    """Every file that git knows or would add; in a tree without git, every file but caches."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        paths = [ROOT / name for name in done.stdout.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [path for path in ROOT.rglob("*") if not LEFT_OUT & set(path.relative_to(ROOT).parts)]
    return tuple(sorted(path for path in paths if path.is_file()))


def text_files() -> tuple[Path, ...]:
    """The files that people read."""
    return tuple(path for path in files() if path.suffix not in NOT_TEXT)


def python_files(under: Path) -> tuple[Path, ...]:
    """The Python files below a folder."""
    return tuple(path for path in files() if path.suffix == ".py" and under in path.parents)


def shown(path: Path) -> str:
    """A path as it is named in messages."""
    return path.relative_to(ROOT).as_posix()


@cache
def parsed(path: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(path.read_text(), shown(path))


def module_name(path: Path) -> str:
    """`refitfsm/model/table.py` as `refitfsm.model.table`; a package is named without `__init__`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.Module) -> Iterator[Function]:
    """Every function and method, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))
