"""The pages that are made from what users touch: policies, errors, the Python API, the command line."""

import ast
import inspect
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

import msgspec
import typer

from pages.markdown import Cells, code, grid, listed, page
from pages.source import class_node, docstring, fields, tree
from refitfsm import policies

ROOT = Path(__file__).resolve().parents[2]


def policies_page() -> str:
    """The keys of a policy and the shipped ones."""
    meanings = policy_meanings()
    keys = []
    for field in msgspec.structs.fields(policies.Policy):
        default = "required" if field.required else code(toml(field.default))
        keys.append((code(field.encode_name), _kind(field.type), default, meanings[field.encode_name]))
    deadlines = [
        (code(field.encode_name), code(toml(field.default)))
        for field in msgspec.structs.fields(policies.Deadlines)
    ]
    parts = ["## Keys", "", *grid(("key", "value", "default", "meaning"), keys)]
    parts += ["## Deadlines", "", "`deadlines_s`, in seconds, by kind of [command](commands.md):", ""]
    parts += grid(("kind", "default"), deadlines)
    parts += ["## Shipped policies", ""]
    for name in policies.shipped():
        text = (ROOT / "policies" / f"{name}.toml").read_text()
        parts += [
            f"### {name}",
            "",
            tomllib.loads(text)["description"],
            "",
            "```toml",
            text.rstrip(),
            "```",
            "",
        ]
    intro = """A policy says how a fleet is refitted. It is a TOML file: a shipped one is given by its name,
    your own by its path. Unknown keys are refused. See [how to write one](../how-to/write-a-policy.md)."""
    return page("Policies", intro, parts)


def policy_meanings() -> dict[str, str]:
    """What `policies/README.md` says of each key."""
    lines = (ROOT / "policies" / "README.md").read_text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    return {key.strip("`"): meaning for key, meaning, _ in cells}


def toml(value: object) -> str:
    """A default in a policy file's spelling."""
    if isinstance(value, policies.Deadlines):
        return ""
    return msgspec.json.encode(value).decode()


def _kind(given: object) -> str:
    """What a key takes, in words."""
    match msgspec.inspect.type_info(given):
        case msgspec.inspect.EnumType(cls=kind):
            words = _values(kind)
        case msgspec.inspect.VarTupleType(item_type=msgspec.inspect.EnumType(cls=kind)):
            words = "a list of " + _values(kind)
        case msgspec.inspect.IntType(ge=low):
            words = "integer" + (f", at least {low}" if low is not None else "")
        case msgspec.inspect.FloatType(ge=low, gt=above):
            words = "number" + (f", at least {low:g}" if low is not None else "")
            words += f", above {above:g}" if above is not None else ""
        case msgspec.inspect.BoolType():
            words = "`true`, `false`"
        case msgspec.inspect.StructType():
            words = "a table"
        case _:
            words = "text"
    return words


def _values(kind: type[Enum]) -> str:
    return listed(f'"{item.value}"' for item in kind)


def errors_page() -> str:
    """Every exception that callers see."""
    module = tree(Path(inspect.getfile(import_module("refitfsm.errors"))))
    parts = ["```text", (ast.get_docstring(module) or "").partition("\n\n")[2], "```", ""]
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            base = ast.unparse(node.bases[0])
            parts += [f"## {node.name}", "", f"Base: `{base}`. {docstring(node)}", ""]
    intro = """Every error's message is one line: who, in which state, which rule, what to do. What to do
    about each in a trainer is in [how to embed a fleet](../how-to/embed-in-a-trainer.md#when-it-fails)."""
    return page("Errors", intro, parts)


def api_page() -> str:
    """The public classes."""
    exported = import_module("refitfsm")
    names = ("Fleet", "BlockingFleet", "ServerSpec", "CycleReport", "FleetStatus", "Generation")
    parts: list[str] = []
    for name in names:
        kind = getattr(exported, name)
        node = class_node(kind)
        parts += [f"## {name}", "", docstring(node), ""]
        own = [(code(field), code(given), doc) for field, (given, _, doc) in fields(kind).items()]
        parts += grid(("field", "type", "meaning"), own) if own else []
        parts += _methods(kind) if name != "BlockingFleet" else []
    intro = """What `from refitfsm import ...` gives, beside the [errors](errors.md) and the values
    described under [states](states.md)."""
    return page("Python API", intro, parts)


def _methods(kind: type) -> Iterator[str]:
    lines = Path(inspect.getfile(kind)).read_text().splitlines()
    for method in class_node(kind).body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and not method.name.startswith("_"):
            head = "\n".join(lines[method.lineno - 1 : method.body[0].lineno - 1])
            yield from (f"### {kind.__name__}.{method.name}", "", "```python")
            yield f"{textwrap.dedent(head)} ..."
            yield from ("```", "", docstring(method), "")


def cli_page() -> str:
    """The command line, as it is declared: what Typer makes of it differs between Typer's versions."""
    intro = """`--json` prints one JSON object last. Errors go to stderr in one line. Keys of servers are
    read from environment variables and never given on the command line."""
    return page("Command line", intro, _commands("refitfsm", import_module("refitfsm.cli.main").app))


def _commands(name: str, app: typer.Typer) -> Iterator[str]:
    for command in app.registered_commands:
        function = command.callback
        if function is None:
            continue
        yield from (f"## {name} {command.name}", "", command.help or inspect.getdoc(function) or "", "")
        yield from grid(("parameter", "default", "meaning"), _parameters(function))
        lines = [line.strip() for line in inspect.cleandoc(command.epilog or "").splitlines()]
        examples = [line for line in lines if line.startswith(name.split(maxsplit=1)[0])]
        yield from (["```bash", *examples, "```", ""] if examples else [])
        for line in lines:
            yield from () if line in ("Examples:", "", *examples) else (line, "")
    for group in app.registered_groups:
        if group.typer_instance is not None:
            yield from _commands(f"{name} {group.name}", group.typer_instance)


def _parameters(function: Callable[..., object]) -> Iterator[Cells]:
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        kind, *notes = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        info = next((note for note in notes if isinstance(note, typer.models.ParameterInfo)), None)
        if info is not None and not info.hidden:
            default = parameter.default
            yield (
                _named(name, kind, info),
                "required" if default is inspect.Parameter.empty else _default(default),
                info.help or "",
            )


def _named(name: str, kind: type, info: typer.models.ParameterInfo) -> str:
    """`--cycles` K, or `FILE`."""
    choices = (
        "|".join(item.value for item in kind) if inspect.isclass(kind) and issubclass(kind, Enum) else ""
    )
    given = info.metavar or choices
    if not isinstance(info, typer.models.OptionInfo):
        return code(given or name.upper())
    option = "--" + name.replace("_", "-")
    # In an annotation Typer takes the first name for the default.
    given_names = [item for item in (info.default, *(info.param_decls or ())) if isinstance(item, str)]
    plain = f"{option}/--no-{option[2:]}" if kind is bool else option
    names = " / ".join(code(part) for item in given_names or [plain] for part in item.split("/"))
    return names if kind is bool else f"{names} {given or str(getattr(kind, '__name__', 'text')).upper()}"


def _default(value: object) -> str:
    if value is None or value in ((), []):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return code(value.value if isinstance(value, Enum) else value)
