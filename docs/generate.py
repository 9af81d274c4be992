#!/usr/bin/env python3
"""Writes the pages of docs/reference that say what the code says, and what is generated in two READMEs.

python docs/generate.py            write them
python docs/generate.py --check    list those that are stale, and exit 1 if there are any
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pages import rules, scenarios, surface

ROOT = Path(__file__).resolve().parent.parent
DIAGRAM_BEGIN, DIAGRAM_END = "<!-- state diagram: begin -->", "<!-- state diagram: end -->"


def readme() -> str:
    """The README with a fresh diagram."""
    text = (ROOT / "README.md").read_text()
    before, begin, rest = text.partition(DIAGRAM_BEGIN)
    _, end, after = rest.partition(DIAGRAM_END)
    if not begin or not end:
        raise SystemExit("README.md: the marks around the state diagram are gone")
    return f"{before}{begin}\n{rules.diagram_block()}\n{end}{after}"


PAGES: dict[str, Callable[[], str]] = {
    "docs/reference/states.md": rules.states_page,
    "docs/reference/table.md": rules.table_page,
    "docs/reference/guards.md": rules.guards_page,
    "docs/reference/effects.md": rules.effects_page,
    "docs/reference/laws.md": rules.laws_page,
    "docs/reference/commands.md": rules.commands_page,
    "docs/reference/policies.md": surface.policies_page,
    "docs/reference/errors.md": surface.errors_page,
    "docs/reference/api.md": surface.api_page,
    "docs/reference/state-diagram.md": rules.diagram_page,
    "README.md": readme,
    "docs/reference/cli.md": surface.cli_page,
    "docs/reference/scenarios.md": scenarios.scenarios_page,
    "simulations/README.md": scenarios.readme,
}
"""Each generated file and what makes it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check every page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, list stale pages")
    check = parser.parse_args(arguments).check
    stale = False
    for path, make in PAGES.items():
        file, text = ROOT / path, make()
        if file.is_file() and file.read_text() == text:
            continue
        stale = True
        print(f"{path}: {'stale' if check else 'written'}")
        if not check:
            file.write_text(text)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
