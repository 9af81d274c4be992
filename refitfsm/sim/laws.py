"""Laws over what a simulated server truly did, and over belief and truth together.

The controller's own laws (`model.laws`) are about belief. These compare belief with the simulated
server's true record, and judge every answer that was given: they find what raised no error when it
happened.
"""

from collections.abc import Iterable, Mapping

from refitfsm.drivers.labels import version_of
from refitfsm.model.states import Condition, ContentKind, ServerState, Tag
from refitfsm.model.values import ServerView
from refitfsm.sim.requests import Answer
from refitfsm.sim.truth import Truth

_MEMORY = frozenset({Tag.WEIGHTS, Tag.KV_CACHE})
"""Tags that always stand for memory; `cuda_graph` is on the list only, unless a server is told otherwise."""


def wrong_answer(answers: Iterable[Answer], digests: Mapping[int, str], run_id: str) -> str | None:
    """The first answer that breaks a law, as a sentence, or None.

    `digests` are the content digests of all versions that the fleet ever had, by version. An answer is
    right when one whole set of published weights made all of it, its cache was made by the same, and its
    label names them.
    """
    published = set(digests.values())
    for answer in answers:
        makers = {span.label for span in answer.weights}
        if not makers <= published:
            return f"no_answer_from_undefined_or_torn_weights: {answer}"
        if len(makers) > 1:
            return f"no_answer_from_mixed_versions: {answer}"
        if answer.kv_read:
            return f"no_answer_from_a_stale_cache: {answer}"
        told = version_of(answer.version, run_id)
        if makers and told >= 0 and digests.get(told) not in makers:
            return f"no_answer_under_another_versions_label: {answer}"
    return None


def is_comparable(view: ServerView, truth: Truth, incarnation: int = 1) -> bool:
    """Whether a belief can be false: the server is at rest, and what was enrolled lives.

    At rest: nothing is pending, its condition says that its last command is known, and the process that
    was enrolled, its `incarnation`, lives: a death that nobody has met yet is no false belief.
    """
    at_rest = view.pending is None and view.condition is not Condition.SUSPECT
    same = truth.alive and truth.incarnation == incarnation
    return at_rest and same and view.state is not ServerState.OFFLINE


def belief_is_false(
    view: ServerView, truth: Truth, digests: Mapping[int, str], incarnation: int = 1
) -> str | None:
    """Where what is believed of a server at rest is not so, as a sentence, or None.

    What `is_comparable` says no to is not looked at.
    """
    if not is_comparable(view, truth, incarnation):
        return None
    believed: dict[str, object] = {
        "resident": sorted(map(str, view.resident & _MEMORY)),
        "on the server's list of released tags": sorted(map(str, view.released)),
        "session": view.session != 0,
    }
    true: dict[str, object] = {
        "resident": sorted(map(str, truth.resident & _MEMORY)),
        "on the server's list of released tags": sorted(map(str, truth.memory.listed)),
        "session": truth.session is not None,
    }
    if view.paused:
        believed["paused"], true["paused"] = True, truth.gate_closed
    if view.content.kind is ContentKind.COMPLETE and view.content.proved:
        believed["weights"], true["weights"] = digests.get(view.content.version), truth.weights_digest()
    for what, belief in believed.items():
        if belief != true[what]:
            return f"{view.server}: {what}: believed {belief}, truly {true[what]}"
    return None
