"""Whatever user code calls, in whatever order and at once: no server dies and no answer is wrong.

The public API of the fleet, drawn at random: repeats, wrong order, versions that go backwards, callers
that do not know of each other, callers that are cancelled, strangers who probe at any time.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from refitfsm import RefitError
from refitfsm.sim.loop import run
from tests.support.world import World

SEQUENCES = 10_000
PARTS = 20
CALLS = 6
POLICIES = ("colocated", "colocated", "kv_only", "always_on")
VERSIONS = ("0.5.12", "0.5.16", "0.5.23")

Call = Callable[[], Awaitable[object]]


class User:
    """Code that calls a fleet without a plan."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        count = 2 if self.dice.random() < 0.2 else 1
        self.world = World(count, self.dice.choice(POLICIES), version=self.dice.choice(VERSIONS))
        self.version = 0
        self.done: Counter[str] = Counter()

    def draw(self) -> tuple[str, Call]:
        fleet, world = self.world.fleet, self.world
        kind = self.dice.choice(
            ("release", "resume", "refit", "refit", "stage", "commit", "generate", "flush")
        )
        if kind == "refit":
            self.version = max(0, self.version + self.dice.choice((-1, 0, 1, 1, 2)))
            version = self.version
            return kind, lambda: world.refit(version)
        if kind == "stage":
            self.version += self.dice.choice((0, 1, 1))
            version = self.version
            return kind, lambda: world.stage(version)
        if kind == "commit":
            version = self.version
            return kind, lambda: fleet.commit(version)
        if kind == "generate":
            prompt = self.dice.choice(([1, 2, 3], [1, 2, 3, 4], [9]))
            wait_s = self.dice.choice((0.0, 0.5))
            return kind, lambda: fleet.generate(prompt, {"max_new_tokens": 2}, wait_s=wait_s)
        return kind, {"release": fleet.release, "resume": fleet.resume, "flush": fleet.invalidate_kv_cache}[
            kind
        ]

    async def call(self) -> None:
        """One to three calls at once, one of which may be cancelled; errors are ours or none."""
        calls = [self.draw() for _ in range(self.dice.choice((1, 1, 1, 2, 3)))]
        tasks = [asyncio.ensure_future(call()) for _, call in calls]
        if self.dice.random() < 0.15:
            await asyncio.sleep(0)
            tasks[0].cancel()
        for (kind, _), result in zip(
            calls, await asyncio.gather(*tasks, return_exceptions=True), strict=True
        ):
            if isinstance(result, BaseException):
                assert isinstance(result, RefitError | asyncio.CancelledError), repr(result)
            else:
                self.done[kind] += 1

    async def life(self) -> None:
        async with self.world.fleet:
            for _ in range(CALLS):
                await self.call()
                self.world.check()


@pytest.mark.parametrize("part", range(PARTS))
def test_no_sequence_of_calls_kills_a_server(part: int) -> None:
    """10,000 random sequences in all: every server lives, belief is true, every answer is right."""
    done: Counter[str] = Counter()
    for seed in range(part, SEQUENCES, PARTS):
        users: list[User] = []

        async def life(seed: int = seed, users: list[User] = users) -> None:
            users.append(User(seed))
            await users[0].life()

        try:
            run(life())
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        done.update(users[0].done)
    often = ("release", "refit", "stage", "generate", "flush", "resume")
    assert all(done[kind] >= 50 for kind in often), done
    assert done["commit"] >= 20, done
