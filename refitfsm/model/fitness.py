"""What servers have to have in common to be one fleet, and to serve as one."""

from collections.abc import Sequence

from refitfsm.model.rules import Rules
from refitfsm.model.values import ServerView


def unfit(views: Sequence[ServerView], rules: Rules) -> str:
    """Why servers that were just enrolled do not make a fleet under the policy; empty if they do."""
    for view in views:
        if rules.release_tags and not view.capabilities.memory_saver:
            return (
                f"{view.server}: runs without the memory saver, and policy {rules.name} releases memory;"
                " start it with --enable-memory-saver, or use the policy always_on"
            )
        if rules.needs_loader and not view.capabilities.loader:
            return (
                f"{view.server}: was started without our loader, and policy {rules.name} has push_strategy ="
                " registered; start it with --custom-weight-loader refitfsm.server.loader.load, or use auto"
            )
        if rules.verify.needs_checksums and not view.capabilities.checksums:
            return (
                f"{view.server}: SGLang {view.capabilities.sglang_version} makes no checksums, and policy"
                f" {rules.name} asks for them; use verify = version, or a newer SGLang"
            )
    found = [view.capabilities for view in views]
    pushed = {(item.model_path, item.weight_label) for item in found}
    started = {item.start_label for item in found if item.start_label}
    if len(pushed) > 1 or len(started) > 1:
        named = ", ".join(
            f"{view.server} {item.model_path} ({item.weight_label or item.start_label or 'start-up'})"
            for view, item in zip(views, found, strict=True)
        )
        return f"the servers hold different weights: {named}; start all of them from the same checkpoint"
    return ""


def differing_checksums(views: Sequence[ServerView]) -> str:
    """Which servers that should hold the same weights do not, by their checksums; empty if all do.

    A checksum covers a server's shards, so only servers with as many ranks can be compared.
    """
    first: dict[int, ServerView] = {}
    for view in views:
        other = first.setdefault(view.capabilities.tp_size, view) if view.checksum else view
        if view.checksum != other.checksum:
            return f"checksums differ: {other.server} has {other.checksum}, {view.server} {view.checksum}"
    return ""
