"""Rules with one thing changed are found, and the shortcut that finds them is none."""

import pytest

from refitfsm import policies
from refitfsm.check.changes import planner
from refitfsm.check.decisions import watched
from refitfsm.check.hunt import hunt
from refitfsm.check.mutants.beliefs import Beliefs, cases, outcome
from refitfsm.check.mutants.games import plain_game, planned_game, unplanned_games
from refitfsm.check.mutants.graph import Game, Graph, Rule, Unsound, search
from refitfsm.check.mutants.layers import Fate, at_random, by_draws, every_belief, every_state
from refitfsm.check.mutants.rules import KINDS, Mutant, mutants
from refitfsm.check.worlds import worlds
from refitfsm.model.row import Verdict
from refitfsm.model.states import ServerState
from refitfsm.model.table import BOOK, ROWS
from refitfsm.model.values import EventName
from refitfsm.planner.playbook import PLAYBOOK

ALL = {mutant.name: mutant for mutant in mutants()}
NOWHERE = Rule((ServerState.OFFLINE, EventName.ENROL), BOOK)
FOUND_BY_BOTH = (
    "guard removed: serving/pause/0: nothing_is_pending",
    "guard negated: serving/pause/0: gate_is_closed",
    "guard negated: serving/paused/0: answer_is_expected",
    "row dropped: serving/drained/0",
    "row dropped: kv_rebuilt/continue/0",
    "row redirected: offline/enrolled/0: released",
    "row redirected: serving/released/0: serving",
    "effect dropped: serving/paused/0: settle",
    "effect dropped: serving/released/0: note_release",
    "effect dropped: serving/drain/0: note_command",
)


def games() -> tuple[Game, ...]:
    """A planner's game, and one without a planner."""
    kind = next(worlds(policies.load("always_on").rules))
    return planned_game("always_on", kind, 1, 1), next(unplanned_games(0, 1))


def test_everything_that_a_row_says_has_its_mutant() -> None:
    """Each row is dropped, its guards removed and negated, each effect dropped, each destination changed."""
    counts = {kind: sum(mutant.kind == kind for mutant in ALL.values()) for kind in KINDS}
    taken = [row for row in ROWS if row.verdict is Verdict.TAKE]
    guards = sum(len(row.guards) for row in ROWS)
    effects = sum(len(row.effects) for row in ROWS)
    expected = (guards, guards, len(ROWS), len(taken) * (len(ServerState) - 1), effects)
    assert counts == dict(zip(KINDS, expected, strict=True))
    assert all(mutant.cell != BOOK.cells[mutant.rule.key] for mutant in ALL.values())


def test_every_change_breaks_a_law_in_one_step() -> None:
    """There is no guard, row, effect or destination that no law of steps needs; here, in one state."""
    some = [mutant for mutant in ALL.values() if mutant.row.startswith("kv_rebuilt")]
    assert [each.mutant.name for each in every_belief(some) if each.found is None] == []


def test_beliefs_that_are_drawn_find_every_change_too() -> None:
    """By draws, which know of no list of beliefs."""
    assert [each.mutant.name for each in by_draws(list(ALL.values()), "a") if each.found is None] == []


def test_what_is_left_out_of_a_cell_cannot_differ() -> None:
    """A mutant is judged in fewer cases than there are, and in every case in which it leads elsewhere."""
    key = (ServerState.KV_REBUILT, EventName.PAUSED)
    beliefs = Beliefs(key)
    sound = {case: outcome(case, BOOK)[:2] for case in cases(key)}
    for mutant in ALL.values():
        if mutant.rule.key == key:
            others = sound.keys() - {case for case, _ in beliefs.near(mutant)}
            assert others
            assert all(outcome(case, mutant.rule.book)[:2] == sound[case] for case in others)


def test_both_layers_find_them() -> None:
    """These are found in every state, and by walks at random that know nothing of it."""
    some = [ALL[name] for name in FOUND_BY_BOTH]
    missed = [
        (layer, tried.mutant.name)
        for layer, results in (
            ("every state", every_state(some, games())),
            ("at random", at_random(some, "a", games())),
        )
        for tried in results
        if tried.found is None
    ]
    assert missed == []


@pytest.mark.parametrize("faults", [0, 1])
def test_a_graph_reaches_what_a_search_reaches(faults: int) -> None:
    """Under the rules that ship it has the states that a plain search has, and no law is broken."""
    kind = next(worlds(policies.load("always_on").rules))
    plain = hunt(1, faults, kind.world)
    graph = Graph(planned_game("always_on", kind, 1, faults), BOOK)
    assert graph.sound().states == plain.states
    assert not search(graph, NOWHERE).differs


OF_A_FLUSH = [
    mutant
    for mutant in ALL.values()
    if mutant.row.startswith("serving/flush") and mutant.kind != "row dropped"  # which only a graph judges
]


@pytest.mark.parametrize("mutant", OF_A_FLUSH, ids=lambda mutant: mutant.name)
def test_what_a_graph_takes_over_changes_nothing(mutant: Mutant) -> None:
    """A mutant breaks a law in a graph after as many moves as in a search of its own, or in neither."""
    kind = next(worlds(policies.load("always_on").rules))
    book = mutant.rule.book
    decide = watched(planner(PLAYBOOK._replace(book=book)), steps_too=True)
    world = kind.world._replace(decide=decide, book=book)
    plain = hunt(1, 1, world)
    found = search(Graph(planned_game("always_on", kind, 1, 1), BOOK), mutant.rule).found
    assert (found and found.moves) == (plain.broken and len(plain.broken.trace))


def test_the_table_that_ships_is_safe_whatever_is_asked() -> None:
    """Without a planner, and with anything asked in any order, no law is broken."""
    assert Graph(next(unplanned_games(0, 1)), BOOK).sound().states > 1000


def test_nothing_is_learned_from_rules_that_break_a_law() -> None:
    """A graph of rules that are not sound says so, instead of comparing with them."""
    wrong = ALL["row dropped: serving/drained/0"].rule.book
    with pytest.raises(Unsound, match=plain_game(0).name):
        Graph(plain_game(0), wrong).sound()


BY_STEPS = {
    "guard removed: serving/pause/0: gate_is_closed": "what_is_sent_finds_its_server",
    "row redirected: serving/pause/0: kv_rebuilt": "a_request_changes_no_fact",
    "effect dropped: serving/drained/0: close_gate": "an_answer_is_believed",
    "row redirected: serving/paused/0: kv_rebuilt": "an_answer_leads_on",
    "effect dropped: serving/failed/2: drop_command": "an_answer_ends_its_command",
    "row redirected: serving/lost/2: kv_rebuilt": "a_harmless_end_changes_nothing",
    "row redirected: serving/died/0: kv_rebuilt": "only_the_dead_go_offline",
    "row dropped: serving/begun/1": "a_late_answer_changes_nothing",
}


def test_laws_of_steps_find_them() -> None:
    """Changes that no law of states minds break a law of steps."""
    tried = every_state([ALL[name] for name in BY_STEPS], [plain_game(1)])
    found = {each.mutant.name: each.found and each.found.law.partition(":")[0] for each in tried}
    assert found == BY_STEPS


def test_a_search_that_gives_up_decides_nothing() -> None:
    """It is not counted with those that make no difference, nor with those that no law minds."""
    game = plain_game(0)
    lawless = game._replace(judges=(), step=lambda *given: (game.step(*given)[0], ""))
    mutant = ALL["row redirected: serving/pause/0: kv_rebuilt"]
    fates = [next(every_state([mutant], [lawless], spare=spare)).fate for spare in (0, 5_000)]
    assert fates == [Fate.UNDECIDED, Fate.SURVIVES]


def test_walks_repeat_themselves() -> None:
    """The same seed finds the same after as many steps."""
    some = [ALL[name] for name in FOUND_BY_BOTH[:2]]
    assert list(at_random(some, "b", games())) == list(at_random(some, "b", games()))
