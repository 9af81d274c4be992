#!/usr/bin/env python3
"""Builds, or finds, the Python environment in which a real SGLang serves on CPU.

    python3 tests/real/environment.py

prints progress and, last, the path of the environment's python. The environment (2.4 GB, some two and a half
minutes to build) lies in a cache folder outside the checkout: beneath $REFITFSM_CACHE, else
$XDG_CACHE_HOME/refitfsm, else ~/.cache/refitfsm. Its folder is named after the pinned requirements and the
Python version; it counts only once its marker is written, so a build that was cut short is built anew, and
a lock lets one of several runs build while the others wait. The standard library is all this uses.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
ATTEMPTS = 2
HEARTBEAT_S = 30.0
LOG_TAIL_LINES = 15

Report = Callable[[str], None]

# Run by the environment's own python: it starts, and every pinned package is there in its version.
_CHECK = """
import importlib.metadata, sys
for line in sys.argv[1:]:
    name, version = line.split("==")
    if importlib.metadata.version(name).partition("+")[0] != version:
        raise SystemExit(f"{name} is not {version}")
"""


_CHECK_BUILD = (
    _CHECK
    + """
import torch
torch.zeros(1)
"""
)


class BuildError(Exception):
    """The environment could not be built; carries the end of the installer's output."""


def cache_root() -> Path:
    """The folder for what is expensive to make again; see the module's text."""
    explicit = os.environ.get("REFITFSM_CACHE")
    if explicit:
        return Path(explicit).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache").resolve() / "refitfsm"


def pins() -> list[str]:
    """The requirements, comments left out."""
    lines = (line.partition("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines())
    return [line for line in lines if line]


def folder() -> Path:
    """Where the environment for these requirements and this Python lies, built or not."""
    facts = [platform.python_implementation(), platform.python_version(), platform.machine(), *pins()]
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
    return cache_root() / f"sglang-cpu-{key}"


def ensure(report: Report = print) -> Path:
    """The environment's python, built first where it is absent or broken.

    Raises:
        BuildError: the packages could not be installed.
    """
    target = folder()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_suffix(".lock"), report):
        if not _usable(target, report):
            _build(target, report)
    return _python(target)


def _python(target: Path) -> Path:
    return target / "venv" / "bin" / "python"


def _marker(target: Path) -> Path:
    return target / "complete"


@contextlib.contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("environment: another run is busy with it, waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file lets go of the lock


def _usable(target: Path, report: Report) -> bool:
    if not _marker(target).is_file():
        return False
    problem = _problem(target)
    if problem is None:
        return True
    report(f"environment: broken ({problem}), building it anew")
    return False


def _problem(target: Path, check: str = _CHECK) -> str | None:
    command = [str(_python(target)), "-I", "-c", check, *pins()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]


def _build(target: Path, report: Report) -> None:
    started = time.monotonic()
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    report(f"environment: building {target}")
    venv.create(target / "venv", with_pip=True, symlinks=True)
    _install(target, report)
    problem = _problem(target, _CHECK_BUILD)
    if problem is not None:
        raise BuildError(f"the packages were installed and are not usable: {problem}")
    _marker(target).write_text("")
    report(f"environment: built in {time.monotonic() - started:.0f} s")


def _install(target: Path, report: Report) -> None:
    log = target / "install.log"
    # -I keeps a PYTHONPATH or a user's site folder of the caller out of it.
    pip = [str(_python(target)), "-I", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    for attempt in range(1, ATTEMPTS + 1):
        report(f"environment: installing {len(pins())} packages, 2 to 4 minutes")
        with log.open("wb") as output:
            command = [*pip, "--no-deps", "-r", str(REQUIREMENTS)]
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            if _wait(process, report) == 0:
                return
        report(f"environment: attempt {attempt} of {ATTEMPTS} failed")
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
    raise BuildError(f"the packages could not be installed:\n{tail}")


def _wait(process: subprocess.Popen[bytes], report: Report) -> int:
    started = time.monotonic()
    try:
        while True:
            try:
                return process.wait(HEARTBEAT_S)
            except subprocess.TimeoutExpired:
                report(f"environment: still installing after {time.monotonic() - started:.0f} s")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def main() -> int:
    try:
        python = ensure(lambda line: print(line, flush=True))
    except BuildError as error:
        print(f"environment: {error}", file=sys.stderr)
        return 1
    print(python)
    return 0


if __name__ == "__main__":
    sys.exit(main())
