"""The scripts beside this file are what the planner does, to the letter.

`REGENERATE=1 pytest tests/golden` writes them anew; read the difference before you commit it.
"""

import os
from pathlib import Path

import pytest

from tests.golden.interaction import play

SCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_planner_answers_as_written(path: Path) -> None:
    """The planner's answers to a script are those that are written in it."""
    text = path.read_text()
    played = play(text)
    if os.environ.get("REGENERATE"):
        path.write_text(played)
    assert played == path.read_text()


def test_there_are_scripts() -> None:
    """The folder is not empty: a glob that finds nothing would pass for ever."""
    assert len(SCRIPTS) >= 8
