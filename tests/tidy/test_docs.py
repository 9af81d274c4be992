"""Pages say what the code says, and point at what is there."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from textwrap import dedent

import msgspec
import pytest

from refitfsm.policies import Policy
from tests.tidy.tree import ROOT, files, shown

PAGES = [path for path in files() if path.suffix == ".md"]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
ANCHOR = re.compile(r'<a id="([^"]+)">')
COMMANDS = ("make demo", "make test")


def blocks(path: Path, language: str) -> Iterator[str]:
    """The code blocks of a page in one language."""
    return (text for name, text in BLOCK.findall(path.read_text()) if name == language)


@cache
def anchors(path: Path) -> frozenset[str]:
    """What a link into a page may name: headings as GitHub spells them, and ids."""
    text = BLOCK.sub("", path.read_text())
    words = (re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in HEADING.findall(text))
    return frozenset([*(word.replace(" ", "-") for word in words), *ANCHOR.findall(text)])


def test_generated_pages_are_fresh() -> None:
    """Every generated page, and the README's diagram, is what the code says now: else run `make docs`."""
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_links_lead_somewhere(page: Path) -> None:
    """A link to a file or a heading of this repository resolves."""
    broken = []
    for link in LINK.findall(BLOCK.sub("", page.read_text())):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_can_be_found() -> None:
    """Each page of docs/ is linked from another page."""
    linked = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in PAGES
        for link in LINK.findall(page.read_text())
        if "://" not in link
    }
    lost = [shown(page) for page in PAGES if ROOT / "docs" in page.parents and page not in linked]
    assert lost == []


def test_the_readmes_commands_are_in_the_makefile() -> None:
    """The two commands that the README promises exist, and so does every other `make` that a page names."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    readme = "\n".join(blocks(ROOT / "README.md", "bash"))
    assert all(command in readme for command in COMMANDS)
    named = {
        target
        for page in PAGES
        for text in [*blocks(page, "bash"), *re.findall(r"`(make [a-z]+)", page.read_text())]
        for target in re.findall(r"^make ([a-z]+)", text, re.MULTILINE)
    }
    assert {command.split()[1] for command in COMMANDS} <= named <= targets


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_python_in_pages_compiles(page: Path) -> None:
    """Every Python block is Python, and what it imports from this package is there."""
    for text in blocks(page, "python"):
        source = dedent(text)
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
        tree = compile(source, shown(page), "exec", flags=flags)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("refitfsm"):
                module = importlib.import_module(node.module or "")
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@contextmanager
def simulated(folder: Path) -> Iterator[str]:
    """A simulated server, as the tutorial starts it; yields its URL."""
    command = [sys.executable, "-m", "refitfsm", "sim-server", "--port", "0", "--model", "old-weights"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[0]
        finally:
            process.terminate()


def test_the_tutorial_works(tmp_path: Path) -> None:
    """What the tutorial says to type does what the tutorial says: only the ports are others here."""

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    make_weights, program, _, story = blocks(ROOT / "docs" / "tutorial" / "first-fleet.md", "python")
    run(sys.executable, "-c", make_weights)
    with simulated(tmp_path) as first, simulated(tmp_path) as second:
        run(sys.executable, "-m", "refitfsm", "doctor", "--server", first)
        program = program.replace("http://127.0.0.1:30000", first).replace("http://127.0.0.1:30001", second)
        said = run(sys.executable, "-c", program)
    assert "version 0 answers" in said
    assert "version 1 answers" in said
    assert "as it should be: fleet: no server admits requests" in said
    assert "holds" in run(sys.executable, "-m", "refitfsm", "audit", "verify", "run.jsonl")
    assert "cycle committed: serving 1" in run(sys.executable, "-c", story)


def test_each_policy_key_is_described_once() -> None:
    """policies/README.md has one line for each key of a policy, in order, with the default it has."""
    text = (ROOT / "policies" / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.+) \|$", text, re.MULTILINE)
    fields = msgspec.structs.fields(Policy)
    assert [key for key, _ in rows] == [field.encode_name for field in fields]
    for (key, written), field in zip(rows, fields, strict=True):
        if field.required:
            assert written == "required", key
        elif written.startswith("`"):
            assert msgspec.json.decode(written.strip("`")) == msgspec.json.decode(
                msgspec.json.encode(field.default)
            ), key
