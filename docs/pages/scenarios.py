"""What can be written in a scenario, and the scenarios that there are."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from pages.markdown import Cells, code, grid, page
from pages.source import fields, summary
from refitfsm.sim import scenario as form
from refitfsm.sim import scenario_steps as steps
from refitfsm.sim.scenario import Play, Scenario, Servers
from refitfsm.sim.scenario_sights import EVENTS, LAWS

FOLDER = Path(__file__).resolve().parents[2] / "simulations"
BEGIN, END = "<!-- scenarios: begin -->", "<!-- scenarios: end -->"
HEAD = ("key", "value", "default", "meaning")
_ID = re.compile(r"([a-z]+)(\d+)")


def scenarios_page() -> str:
    """The reference of the files' format."""
    parts = ["## The file", "", *grid(HEAD, _keys(Scenario))]
    parts += ["## Servers", "", *grid(HEAD, _keys(Servers))]
    parts += ["## A play", "", *grid(HEAD, _keys(Play))]
    names = ", ".join(f"{code(command)} for {code(path)}" for command, path in form.PATHS.items())
    parts += ["In a fault a command may stand for its path:", "", f"{names}.", ""]
    parts += ["## Steps", "", *grid(("step", "keys", "what it does"), _steps())]
    parts += ["Keys of several of them:", "", *grid(HEAD, _shared())]
    parts += ["## Laws", "", "None of these may be seen where a fleet is played, named or not.", ""]
    parts += grid(("law", "what is seen"), [(code(name), says) for name, says in LAWS.items()])
    parts += ["## What else may be seen", "", *grid(("sight", "what is seen"), _events())]
    intro = """A scenario is a TOML file that `refitfsm simulate --scenario` plays. See
    [how to write one](../how-to/play-scenarios.md) and [those there are](../../simulations/README.md)."""
    return page("Scenarios", intro, parts)


def _keys(kind: type, without: frozenset[str] = frozenset()) -> Iterator[Cells]:
    for name, (given, default, doc) in fields(kind).items():
        if name not in without:
            yield code(name), code(_plain(given)), code(default), doc


def _plain(annotation: str) -> str:
    """A type without what only a program wants of it."""
    text = re.sub(r"Annotated\[(\w+), .*?\)\]", r"\1", annotation).replace('"', "")
    return re.sub(r"\bAnyStep\b", "step", text)


def _steps() -> Iterator[Cells]:
    for kind in vars(steps).values():
        tag = getattr(getattr(kind, "__struct_config__", None), "tag", None)
        if inspect.isclass(kind) and tag is not None and kind.__name__.lower() == str(tag).replace("_", ""):
            yield code(tag), ", ".join(code(name) for name in _own(kind)), summary(kind)


_SHARED = (steps.Step, steps.FleetStep, steps.Weights, steps.Raw)


def _own(kind: type) -> list[str]:
    shared = {name for base in (steps.Step, steps.FleetStep) for name in fields(base)}
    every = [
        name for base in reversed(kind.__mro__) if base.__module__ == kind.__module__ for name in fields(base)
    ]
    return [name for name in every if name not in shared]


def _shared() -> Iterator[Cells]:
    for kind in _SHARED:
        yield from _keys(kind)
    for other in (steps.Connect, steps.Push):
        yield from _keys(other, frozenset({"version", "renamed"}))


def _events() -> Iterator[Cells]:
    return ((code(name), says) for name, says in EVENTS.items())


def readme() -> str:
    """The folder's README with a fresh table."""
    text = (FOLDER / "README.md").read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit("simulations/README.md: the marks around the table are gone")
    table = "\n".join(grid(("scenario", "of", "what it shows"), map(_row, sorted(_files(), key=_order))))
    return f"{before}{begin}\n\n{table}\n{end}{after}"


def _files() -> tuple[Path, ...]:
    return form.files(FOLDER)


def _order(path: Path) -> tuple[str, int, str]:
    found = _ID.match(path.stem)
    return (found[1], int(found[2]), path.stem) if found else ("", 0, path.stem)


def _row(path: Path) -> Cells:
    scenario = form.load(path)
    links = [f"[{_short(url)}]({url})" for url in scenario.sources]
    what = scenario.shows + (f" **Open**: {scenario.open}" if scenario.open else "")
    return f"[{path.stem}]({path.name})", "<br>".join([", ".join(scenario.ids), *links]), what


def _short(url: str) -> str:
    """`https://github.com/owner/name/pull/12` as `owner/name#12`."""
    owner, name, _, number = url.removeprefix("https://github.com/").split("/")
    return f"{owner}/{name}#{number}"
