"""One prompt to every server of a fleet."""

import asyncio
from collections.abc import Sequence

from refitfsm.errors import RequestFailed
from refitfsm.fleet import Fleet
from refitfsm.generation import Generation
from refitfsm.model.fleet import admits

TOKENS = 16
ROUNDS = 5
ANSWER_S = 60.0


async def ask_each(fleet: Fleet, prompt: Sequence[int]) -> dict[str, Generation]:
    """The greedy answer of every server that serves, by server.

    A fleet sends a request where the fewest are in flight, so as many at once as there are servers
    reach each of them, unless something else is in flight: then it is tried again. So is a request that
    broke off: a second one also finds out whether the server is dead.

    Raises:
        RequestFailed: a server that lives did not answer in several rounds.
        NotServing: none serves.
    """
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    answers: dict[str, Generation] = {}
    wanted: set[str] = set()
    failure = ""
    for _ in range(ROUNDS):
        wanted = {view.server for view in fleet.status().servers if admits(view)}
        if wanted and wanted <= answers.keys():
            return {server: answers[server] for server in sorted(wanted)}
        asked = [fleet.generate(prompt, sampling, timeout_s=ANSWER_S) for _ in range(max(1, len(wanted)))]
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, Generation):
                answers[answer.server] = answer
            elif isinstance(answer, RequestFailed):
                failure = str(answer)
            else:
                raise answer
    silent = ", ".join(sorted(wanted - answers.keys()))
    raise RequestFailed(failure or f"{silent}: no request got there; ask again")
