"""Which part of the package may import which: read from the syntax, so that no import can hide."""

import ast
import json
import subprocess
import sys
from functools import cache
from typing import NamedTuple

import pytest

from tests.tidy.tree import PACKAGE, module_name, parsed, python_files

PURE = frozenset({"enum", "typing", "dataclasses", "collections", "itertools"})
HEAVY = frozenset({"torch", "ray", "sglang"})

LAYERS: dict[str, frozenset[str]] = {
    "model": frozenset(),
    "planner": frozenset({"model"}),
    "server": frozenset(),
    "weights": frozenset({"server"}),
    "drivers": frozenset({"model", "weights", "server", "errors"}),
    "audit": frozenset({"model", "errors"}),
    "machine": frozenset({"model", "errors"}),
    "errors": frozenset(),
    "gate": frozenset(),
    "hooks": frozenset({"errors"}),
    "graph": frozenset({"model"}),
    "policies": frozenset({"model", "weights", "errors"}),
    "servers": frozenset({"errors"}),
    "generation": frozenset({"drivers", "errors"}),
    "pushes": frozenset({"model", "weights", "drivers", "policies", "errors"}),
    "controller": frozenset({"model", "planner", "machine", "audit", "drivers", "gate", "errors"}),
    "reports": frozenset({"model", "controller", "errors"}),
    "replay": frozenset({"model", "planner", "audit", "errors"}),
}
"""For each part: the other parts of the package that it may import."""


class Import(NamedTuple):
    """One imported module, and when it is imported."""

    module: str
    always: bool
    """At import, not inside a function and not for the type checker alone."""


class _Imports(ast.NodeVisitor):
    """Collects what a module imports."""

    def __init__(self, known: frozenset[str]) -> None:
        self.known = known
        self.found: list[Import] = []
        self._always = True

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [Import(alias.name, self._always) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, "imports are absolute"
        base = node.module or ""
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            self.found.append(Import(inner if inner in self.known else base, self._always))

    def _later(self, node: ast.AST) -> None:
        before, self._always = self._always, False
        self.generic_visit(node)
        self._always = before

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._later(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._later(node)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            before, self._always = self._always, False
            for child in node.body:
                self.visit(child)
            self._always = before
            for child in node.orelse:
                self.visit(child)
        else:
            self.generic_visit(node)


@cache
def imports() -> dict[str, tuple[Import, ...]]:
    """What each module of the package imports."""
    paths = {module_name(path): path for path in python_files(PACKAGE)}
    result: dict[str, tuple[Import, ...]] = {}
    for name, path in paths.items():
        visitor = _Imports(frozenset(paths))
        visitor.visit(parsed(path))
        result[name] = tuple(visitor.found)
    return result


def part_of(module: str) -> str:
    """`refitfsm.model.table` is of the part `model`; the root package is of the part ``."""
    return module.partition(".")[2].partition(".")[0]


def inside(part: str) -> dict[str, tuple[Import, ...]]:
    """The modules of one part of the package."""
    return {name: found for name, found in imports().items() if part_of(name) == part}


def root(module: str) -> str:
    return module.partition(".")[0]


def offenders(part: str, allowed: frozenset[str]) -> list[str]:
    """Imports of other parts of the package that are not allowed."""
    return [
        f"{name} imports {item.module}"
        for name, found in inside(part).items()
        for item in found
        if root(item.module) == "refitfsm" and part_of(item.module) not in allowed | {part}
    ]


@pytest.mark.parametrize("part", sorted(LAYERS))
def test_parts_import_only_what_is_below_them(part: str) -> None:
    """The dependency direction holds: nothing imports upward or sideways."""
    assert inside(part), f"there is no part {part}"
    assert offenders(part, LAYERS[part]) == []


@pytest.mark.parametrize("part", ["model", "planner"])
def test_the_rules_import_nothing_that_acts(part: str) -> None:
    """Model and planner are pure: no clock, no randomness, no I/O, no third-party code."""
    outside = [
        f"{name} imports {item.module}"
        for name, found in inside(part).items()
        for item in found
        if root(item.module) not in PURE | {"refitfsm"}
    ]
    assert outside == []


@pytest.mark.parametrize(
    ("library", "owner"), [("transitions", "refitfsm.machine"), ("structlog", "refitfsm.audit.sink")]
)
def test_a_library_with_one_owner_is_imported_there_alone(library: str, owner: str) -> None:
    """`transitions` is the second judge's and structlog the log's; nothing else depends on them."""
    users = {name for name, found in imports().items() if library in {root(item.module) for item in found}}
    assert users == {owner}


def test_the_auditor_never_reaches_the_planner() -> None:
    """A journal is judged by code that shares nothing with the code that wrote it but the rules.

    Importing any module runs the root package as well; that is Python's doing and not followed here.
    """
    reached, waiting = set[str](), ["refitfsm.audit.verify"]
    while waiting:
        module = waiting.pop()
        if module in reached or module == "refitfsm":
            continue
        reached.add(module)
        waiting += [item.module for item in imports()[module] if item.module in imports()]
    assert "refitfsm.audit.verify" in reached
    assert {part_of(module) for module in reached} & {"planner", "machine", "controller", "fleet"} == set()


def test_only_the_command_line_and_tests_import_the_simulator() -> None:
    """Whoever embeds a fleet ships no simulator."""
    users = [
        f"{name} imports {item.module}"
        for name, found in imports().items()
        for item in found
        if part_of(item.module) == "sim"
        and root(item.module) == "refitfsm"
        and part_of(name) not in ("sim", "cli", "testing")
    ]
    assert users == []


def test_heavy_libraries_are_imported_when_used() -> None:
    """No module imports torch, Ray or SGLang while it is imported itself, but those that run beside it."""
    beside = ("refitfsm.server.loader", "refitfsm.weights.hash_kernel")
    users = [
        f"{name} imports {item.module}"
        for name, found in imports().items()
        for item in found
        if item.always and root(item.module) in HEAVY and not name.startswith(beside)
    ]
    assert users == []


def test_importing_the_package_loads_nothing_heavy() -> None:
    """Using `refitfsm` in a fresh interpreter loads no torch, no Ray, no SGLang and no simulator."""
    code = "import json, sys, refitfsm; refitfsm.Fleet; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout)
    assert "refitfsm.fleet" in loaded
    heavy = [
        name for name in loaded if root(name) in HEAVY or name.startswith(("refitfsm.sim", "refitfsm.cli"))
    ]
    assert heavy == []


def test_a_server_that_loads_with_us_needs_only_torch() -> None:
    """What runs inside an SGLang server imports the standard library, torch, and itself."""
    outside = [
        f"{name} imports {item.module}"
        for name, found in inside("server").items()
        for item in found
        if root(item.module) not in {*sys.stdlib_module_names, "torch", "refitfsm"}
    ]
    assert outside == []
    code = "import json, sys, refitfsm.server.protocol; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = [name for name in json.loads(done.stdout) if root(name) == "refitfsm"]
    assert ours == ["refitfsm", "refitfsm.server", "refitfsm.server.protocol"]
