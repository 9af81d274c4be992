"""The tests of tests/with_torch, each file in the environment that holds torch and SGLang."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "tests" / "with_torch").glob("test_*.py"))


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_all_hold_with_torch(file: Path, real_python: Path) -> None:
    """Every test of the file passes, and there is at least one."""
    done = subprocess.run(
        [str(real_python), "-m", "pytest", "-q", f"--confcutdir={file.parent}", str(file)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
