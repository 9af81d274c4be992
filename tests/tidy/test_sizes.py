"""Files and functions stay short enough to be read at a sitting."""

import pytest

from tests.tidy.tree import PACKAGE, ROOT, functions, parsed, python_files, shown

MODULE_LINES, FUNCTION_LINES = 400, 70
FOLDERS = [PACKAGE, ROOT / "tests", ROOT / "docs"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_modules_are_short(folder: object) -> None:
    """No module has more than 400 lines."""
    long = {
        shown(path): lines
        for path in python_files(ROOT)
        if folder in path.parents and (lines := len(path.read_text().splitlines())) > MODULE_LINES
    }
    assert long == {}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_functions_are_short(folder: object) -> None:
    """No function has more than 70 lines, its docstring counted."""
    long = {
        f"{shown(path)}:{node.lineno} {node.name}": lines
        for path in python_files(ROOT)
        if folder in path.parents
        for node in functions(parsed(path))
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES
    }
    assert long == {}
