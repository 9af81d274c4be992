"""What must not be in the tree: one machine's paths, patched modules, sleeps, tests that state no law."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.tree import ROOT, functions, parsed, python_files, shown, text_files

TESTS = ROOT / "tests"

# Put together from pieces, so that this file does not hold what it looks for.
MACHINE_PATH = re.compile(r"(?<![\w.~}])/" + "(?:" + "|".join(("work", "root", "home")) + ")/")
REGISTRY = re.compile(
    "|".join(("pypi" + r"\.org", "python" + "hosted", "index" + "-url", "artifact" + "ory"))
)


def matches(pattern: re.Pattern[str]) -> list[str]:
    """Where a pattern occurs, in any text file."""
    return [
        f"{shown(path)}:{number}: {line.strip()[:120]}"
        for path in text_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]


def collected_files() -> Iterator[Path]:
    """The files that pytest reads tests and fixtures from."""
    return (path for path in python_files(TESTS) if path.name.startswith(("test_", "conftest")))


def test_no_file_names_a_folder_of_one_machine() -> None:
    """A checkout works wherever it lies."""
    assert matches(MACHINE_PATH) == []


def test_no_file_names_a_package_registry() -> None:
    """Where packages come from is the user's choice, made in pip's own configuration."""
    assert matches(REGISTRY) == []


def test_every_test_states_its_law() -> None:
    """The docstring of a test says, in a sentence, what must be true."""
    silent = [
        f"{shown(path)}:{node.lineno} {node.name}"
        for path in collected_files()
        for node in functions(parsed(path))
        if node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert silent == []


def test_nothing_is_mocked() -> None:
    """Tests run the real code against fakes that have a contract, not against patched modules."""
    users = [
        f"{shown(path)}:{node.lineno}"
        for path in python_files(TESTS)
        for node in ast.walk(parsed(path))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("unittest"))
        or (isinstance(node, ast.Import) and any(alias.name.startswith("unittest") for alias in node.names))
    ]
    assert users == []


def test_no_test_sleeps() -> None:
    """A test waits for what it needs, with a deadline; it does not guess how long that takes."""
    sleepers = [
        f"{shown(path)}:{node.lineno}"
        for path in collected_files()
        for node in ast.walk(parsed(path))
        if (isinstance(node, ast.Call) and ast.unparse(node.func) == "time.sleep")
        or (isinstance(node, ast.ImportFrom) and node.module == "time" and "sleep" in ast.unparse(node))
    ]
    assert sleepers == []
