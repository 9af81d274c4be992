"""What a server holds is proved before it serves: by values that are read back, and by the names it has."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from refitfsm import ConfigError, CycleAborted
from refitfsm.model.states import Condition
from refitfsm.sim.config import FAST, SimConfig
from refitfsm.sim.content import tiny_tensors
from refitfsm.sim.faults import FaultPlan, parse_fault
from refitfsm.sim.loop import run
from refitfsm.weights.manifest import Manifest
from refitfsm.weights.offer import Target
from refitfsm.weights.proof import Comparison, RankSums
from tests.support.world import TinySource, World

PUSH, CHECK, READ = "/update_weights_from_tensor", "/weights_checker", "/get_weights_by_name"
NORM = "model.norm.weight"


class Counting(FaultPlan):
    """Counts calls by path, and lets those befall faults that are given."""

    def __init__(self, *specs: str) -> None:
        super().__init__(map(parse_fault, specs))
        self.calls: list[str] = []

    def draw(self, path: str):  # type: ignore[no-untyped-def]
        self.calls.append(path)
        return super().draw(path)


def policy(tmp_path: Path, level: str) -> str:
    path = tmp_path / f"{level}.toml"
    path.write_text(f'description = "Proved."\nverify = "{level}"\n')
    return str(path)


def config(**options: object) -> SimConfig:
    return SimConfig(timings=FAST, skip_warmup=True, **options)  # type: ignore[arg-type]


class Partly(TinySource):
    """Knows the checksums of all but some tensors."""

    uncovered = ("model.embed_tokens.weight", "lm_head.weight", "not.there.weight")

    def compare(self, ranks: Sequence[RankSums], target: Target, *, on_cpu: bool) -> Comparison:
        assert ranks
        assert not on_cpu
        return Comparison((), ("odd",), 7, self.uncovered)


@pytest.mark.parametrize(("version", "tp_size"), [("0.5.10", 1), ("0.5.23", 2)])
def test_a_sample_proves_what_was_pushed(tmp_path: Path, version: str, tp_size: int) -> None:
    """On every version, with or without checksums: a few values are read back, and the fleet serves."""

    async def life() -> None:
        given = config(sglang_version=version, tp_size=tp_size)
        calls = Counting()
        world = World(1, policy(tmp_path, "sample"), config=given, faults={"s0": calls})
        async with world.fleet:
            await world.refit(1)
            assert world.serving() == ["s0"]
            world.check()
        assert 1 < calls.calls.count(READ) <= 8
        assert "8 of 21 tensors were read back, as they were pushed" in str(world.journal.lines)
        world.check_journal()

    run(life())


def test_a_sample_finds_a_tensor_that_was_not_pushed_right(tmp_path: Path) -> None:
    """The server says success and holds something else: it does not serve, and the tensor is named."""

    async def life() -> None:
        faults = {"s1": FaultPlan([parse_fault(f"corrupt@{PUSH}:2+")])}
        world = World(2, policy(tmp_path, "sample"), config=config(), faults=faults)
        async with world.fleet as fleet:
            with pytest.raises(CycleAborted, match=r"sample: model\.embed_tokens\.weight differ from what"):
                await world.refit(1)
            conditions = {view.server: view.condition for view in fleet.status().servers}
            assert conditions["s1"] is Condition.QUARANTINED
            assert "s1" not in world.serving()
            world.check()
        world.check_journal()

    run(life())


def test_a_sample_needs_a_model_that_can_read_back(tmp_path: Path) -> None:
    """Where nothing can be read back nothing is proved: the refit fails, with what to use instead."""

    async def life() -> None:
        world = World(1, policy(tmp_path, "sample"), config=config(reads_back=False))
        async with world.fleet:
            with pytest.raises(CycleAborted, match=r"cannot read weights back.*use verify = checksum"):
                await world.refit(1)
            assert world.serving() == []
            world.check()

    run(life())


def test_weights_whose_values_cannot_be_seen_are_refused_at_once(tmp_path: Path) -> None:
    """There is nothing to compare with: no byte is sent."""

    class Blind:
        """All of a source but the sight of its values."""

        def __init__(self) -> None:
            tiny = TinySource(1)
            self.manifest, self.plan, self.offer = tiny.manifest, tiny.plan, tiny.offer
            self.release, self.close = tiny.release, tiny.close

    async def life() -> None:
        world = World(1, policy(tmp_path, "sample"), config=config())
        async with world.fleet as fleet:
            with pytest.raises(ConfigError, match=r"verify = sample.*use verify = checksum"):
                await fleet.refit(Blind(), 1)
            assert world.serving() == ["s0"]

    run(life())


def test_content_reads_back_what_no_checksum_covers(tmp_path: Path) -> None:
    """The audit says what was compared by checksum, what was read back, and what is neither."""

    async def life() -> None:
        world = World(1, policy(tmp_path, "content"), config=config())
        async with world.fleet as fleet:
            await fleet.refit(Partly(1), 1)
        said = str(world.journal.lines)
        assert "7 tensors have the checksums of what was pushed, odd not compared" in said
        assert "2 others were read back, as they were pushed; not.there.weight neither" in said

    run(life())


def test_content_finds_what_no_checksum_covers(tmp_path: Path) -> None:
    """A tensor whose making is unknown is wrong, and reading it back tells."""

    async def life() -> None:
        faults = {"s0": FaultPlan([parse_fault(f"corrupt@{PUSH}:*")])}
        world = World(1, policy(tmp_path, "content"), config=config(), faults=faults)
        async with world.fleet as fleet:
            with pytest.raises(CycleAborted, match=r"content: model\.embed_tokens\.weight differ"):
                await fleet.refit(Partly(1), 1)

    run(life())


def test_content_is_proved_by_checksums_where_nothing_can_be_read_back(tmp_path: Path) -> None:
    """What was compared counts, and the rest is named."""

    async def life() -> None:
        world = World(1, policy(tmp_path, "content"), config=config(reads_back=False))
        async with world.fleet as fleet:
            await fleet.refit(Partly(1), 1)
            assert world.serving() == ["s0"]
        assert "not.there.weight neither, the server cannot read weights back" in str(world.journal.lines)

    run(life())


class Named(TinySource):
    """The tiny model with other names."""

    def __init__(self, seed: int, names: Mapping[str, str]) -> None:
        super().__init__(seed)
        self.names = names

    @property
    def manifest(self) -> Manifest:
        specs = super().manifest.tensors
        return Manifest(
            tuple(
                spec._replace(name=self.names.get(spec.name, spec.name))
                for spec in specs
                if self.sends(spec.name)
            )
        )

    def sends(self, name: str) -> bool:
        return self.names.get(name, name) != ""


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ({NORM: ""}, "Tensor 'model.norm.weight' is not sent"),
        ({NORM: "model.layers.0.self_attn.q_norm.weight"}, "q_norm.weight' is sent, and goes into nothing"),
    ],
)
def test_names_are_compared_with_the_servers_own(names: Mapping[str, str], why: str) -> None:
    """Without its checkpoint a server is asked, once, and weights of another model are not sent."""

    async def life() -> None:
        calls = Counting()
        world = World(2, "always_on", faults={"s0": calls, "s1": Counting()})
        async with world.fleet as fleet:
            for _ in range(2):
                with pytest.raises(ConfigError, match=why):
                    await fleet.refit(Named(1, names), 1)
            assert calls.calls.count(CHECK) == 1
            assert calls.calls.count(PUSH) == 0
            await world.refit(1)
            world.check()

    run(life())


def test_names_that_may_be_known_otherwise_are_sent() -> None:
    """Most of the names are strange: SGLang may know them by others, so nothing is refused."""

    async def life() -> None:
        world = World(1, "always_on")
        async with world.fleet as fleet:
            names = {name: f"model.language_{name}" for name in tiny_tensors(1)}
            with pytest.raises(CycleAborted, match="the weights cannot be made"):  # so they were to be sent
                await fleet.refit(Named(1, names), 1)
            await world.refit(2)

    run(life())


def test_a_server_without_its_weights_is_not_asked() -> None:
    """The question would kill it: a refit after a release goes on without."""

    async def life() -> None:
        calls = Counting()
        world = World(1, "colocated", faults={"s0": calls})
        async with world.fleet as fleet:
            await fleet.release()
            await world.refit(1)
            world.check()
        assert CHECK not in calls.calls

    run(life())


def test_several_ranks_are_not_asked_unless_the_policy_asks_them_anyway(tmp_path: Path) -> None:
    """A question that fails on one rank leaves the others waiting."""

    async def life(name: str) -> int:
        calls = Counting()
        given = config(tp_size=2, memory_saver=False)
        world = World(1, name, config=given, faults={"s0": calls})
        async with world.fleet:
            await world.refit(1)
        return calls.calls.count(CHECK)

    assert run(life("always_on")) == 0
    assert run(life(policy(tmp_path, "checksum"))) == 2


def test_no_cycle_opens_while_a_server_is_asked() -> None:
    """A release that is asked for meanwhile waits, so that the question meets the weights in their place."""

    async def life() -> None:
        world = World(1, "colocated", faults={"s0": FaultPlan([parse_fault(f"slow=5@{CHECK}")])})
        async with world.fleet as fleet:
            refit = asyncio.create_task(world.refit(1))
            await asyncio.sleep(1)
            release = asyncio.create_task(fleet.release())
            await asyncio.gather(refit, release, return_exceptions=True)
            assert world.servers["s0"].truth.alive
            world.check()
        world.check_journal()

    run(life())


@pytest.mark.parametrize("fault", ["hang-before", "status-before=500", "lose-answer", "garble"])
def test_a_question_without_an_answer_costs_a_warning(fault: str) -> None:
    """The first weights are then not compared, as where no server can be asked."""

    async def life() -> None:
        world = World(1, "always_on", faults={"s0": FaultPlan([parse_fault(f"{fault}@{CHECK}")])})
        async with world.fleet:
            await world.refit(1)
            assert world.serving() == ["s0"]
            world.check()

    run(life())
