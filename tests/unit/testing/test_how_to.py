"""What the page on testing a trainer says to write works as it is written there."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.tidy.test_docs import blocks
from tests.tidy.tree import ROOT

FEW = """
from hypothesis import settings
settings.register_profile("few", max_examples=10, stateful_step_count=20, deadline=None, derandomize=True)
settings.load_profile("few")
"""
PAGE = ROOT / "docs" / "how-to" / "test-your-trainer.md"


def test_every_file_of_the_page_is_a_test_that_passes(tmp_path: Path) -> None:
    """The files that the page shows pass side by side, with a small policy for the reader's."""
    for text in blocks(PAGE, "python"):
        name = re.match(r"# (\w+\.py)\n", text)
        assert name, "each block names its file"
        (tmp_path / name[1]).write_text(text)
    with (tmp_path / "conftest.py").open("a") as conftest:
        conftest.write(FEW)
    (tmp_path / "my-policy.toml").write_text('description = "mine"\nrelease = ["kv_cache"]\n')
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "."]
    done = subprocess.run(command, cwd=tmp_path, env=_quick(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout


def _quick() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "CI": "1"}
