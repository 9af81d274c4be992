"""Whether a fleet comes to serve again once nothing goes wrong any more."""

from refitfsm.check.moves import State, World, moves
from refitfsm.model.fleet import Goal, admits, usable
from refitfsm.planner.requests import Request, refusal

STEPS_MAX = 1000


def never_heals(state: State, world: World) -> str:
    """Why refits that meet no fault do not lead a fleet at rest to serve; empty if they do.

    Each may find a server dead that died unnoticed, so there are as many as servers, and two. A refit that is
    refused names the server and the remedy, and that is an end too.
    """
    for _ in range(len(state.truth) + 2):
        fleet = state.fleet
        request = Request(Goal.REFIT, fleet.serving_version + 1, (1,) * world.chunks)
        if refusal(fleet, request, world.rules) is not None:
            return ""
        state = state._replace(fleet=world.decide(fleet, request, 0.0, world.rules).fleet, faults=0)
        for _ in range(STEPS_MAX):
            if state.fleet.cycle is None:
                break
            calm = next((move for move in moves(state, world) if not move.is_fault), None)
            if calm is None or calm.given is None:
                return f"a_cycle_ends: nothing is left to happen in cycle {state.fleet.cycle.goal}"
            after = world.decide(calm.state.fleet, calm.given, 0.0, world.rules).fleet
            state = calm.state._replace(fleet=after)
        else:
            return f"a_cycle_ends: not after {STEPS_MAX} answers"
        if all(admits(view) for view in state.fleet.servers.values() if usable(view)):
            return ""
    return "a_fleet_heals: refits that meet no fault do not lead it to serve, and are not refused either"
