"""What users give to be pushed: made a source, compared with the servers' model, planned, and handed out."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from refitfsm.drivers.push import Load
from refitfsm.drivers.sglang import SGLangDriver
from refitfsm.errors import ConfigError
from refitfsm.model.fleet import FleetView
from refitfsm.model.states import Condition, ServerState, Tag
from refitfsm.model.values import ServerView, VerifyLevel
from refitfsm.policies import Policy
from refitfsm.weights.errors import WeightsError
from refitfsm.weights.fusion import departures
from refitfsm.weights.manifest import Manifest
from refitfsm.weights.plan import PushWish
from refitfsm.weights.proof import ProvesContent
from refitfsm.weights.readback import shown
from refitfsm.weights.safetensors import CheckpointFolder
from refitfsm.weights.source import CheckpointSource, WeightSource
from refitfsm.weights.torch_checks import Module

Weights = WeightSource | str | Path | Mapping[str, object] | Iterable[tuple[str, object]] | Module
"""What can be pushed: a source, a safetensors folder, a state dict of torch tensors, such pairs of names and
tensors, or a module with the names of its checkpoint."""


def as_source(weights: Weights) -> WeightSource:
    """A source of what was given; itself if it is one.

    Raises:
        WeightsError: it cannot be read or sent.
    """
    if isinstance(weights, str | Path):
        return CheckpointSource(CheckpointFolder.open(Path(weights)))
    if isinstance(weights, WeightSource):
        return weights
    from refitfsm.weights.torch_source import TorchSource  # noqa: PLC0415 - torch is optional

    if isinstance(weights, Module):
        return TorchSource(weights)
    if isinstance(weights, Iterable):
        return TorchSource(weights)
    kind = type(weights).__name__  # type: ignore[unreachable]  # not for whoever uses no checker
    raise WeightsError(
        f"{kind} is nothing to push: give a folder, a state dict, pairs, a module or a weight source"
    )


VERSION_MAX = 2**53 - 1
"""The largest whole number that every reader of JSON takes exactly."""


def check_version(version: int) -> None:
    """Whether something can be a version.

    Raises:
        ConfigError: it is no whole number, or too large a one.
    """
    if not isinstance(version, int) or isinstance(version, bool) or version > VERSION_MAX:
        raise ConfigError(f"version {version!r}: give a whole number, such as the training step")


class Pushes:
    """The weights of the open refit, in the hands of the drivers that push them.

    Args:
        drivers: by server.
        policy: how weights are handed over.
        warn: told what somebody should know.
    """

    def __init__(
        self, drivers: Mapping[str, SGLangDriver], policy: Policy, warn: Callable[[str], None]
    ) -> None:
        self._drivers = drivers
        self._policy = policy
        self._warn = warn
        self._reference: Manifest | None = None
        """What the servers' model consists of, as far as it is known."""
        self._names: frozenset[str] | None = None
        """Those of a server's own tensors; None: none was asked, and empty: it did not say them."""
        self._staged: Manifest | None = None
        self._opened: list[WeightSource] = []
        """Sources made here; closed once no cycle can read them."""
        self._load: Load | None = None

    def prepare(self, weights: Weights, fleet: FleetView) -> WeightSource:
        """Check weights against the servers' model, and plan their pushes if no cycle is open.

        Raises:
            ConfigError: they are not the servers' model.
            WeightsError: they cannot be read, or not be pushed as the policy wants it.
        """
        views = tuple(fleet.servers.values())
        source = as_source(weights)
        if source is not weights:
            self._opened.append(source)
        check_provable(source, self._policy.verify)
        if self._reference is None:
            self._reference = server_manifest(views)
        if self._reference is None:
            self._warn(f"the servers' checkpoint cannot be read from here: {self._by_names(source.manifest)}")
        check_manifest(source.manifest, self._reference or source.manifest)
        if fleet.cycle is None:  # else this refit is about to be refused
            self._hand_out(Load(source, source.plan(self._wish(views)).chunks))
        return source

    async def ask(self, fleet: FleetView) -> None:
        """Ask a server for its tensors' names, once, if its checkpoint cannot be read from here.

        Not while a cycle is open, and none may open meanwhile: the question kills a server whose weights are
        released. One of several ranks is asked only where the policy asks for the same anyway, with all
        memory resident as now: if the question fails on one rank, SGLang's other ranks wait for ever.
        """
        views = tuple(fleet.servers.values())
        known = self._names is not None or self._reference is not None
        if known or fleet.cycle is not None or server_manifest(views) is not None:
            return
        asked = self._policy.verify.needs_checksums and not self._policy.release
        fit = (view for view in views if can_be_asked(view) and (asked or view.capabilities.tp_size == 1))
        view = next(fit, None)
        if view is not None:
            self._names = frozenset()  # whatever comes of it
            self._names = await self._drivers[view.server].tensor_names()

    def _by_names(self, manifest: Manifest) -> str:
        """Compare the first weights by name alone, as far as that is certain; in words, what that was.

        Raises:
            ConfigError: they are not the servers' model.
        """
        found = departures(manifest, self._names) if self._names else None
        if found is None:
            return "the first weights are not compared"
        differences = [f"Tensor {name!r} is not sent, nor its parts." for name in found.missing]
        differences += [f"Tensor {name!r} is sent, and goes into nothing there." for name in found.unknown]
        refuse(differences)
        return "of the first weights only the names are compared"

    def _wish(self, views: Sequence[ServerView]) -> PushWish:
        policy = self._policy
        return PushWish(
            policy.push_strategy,
            policy.chunk_bytes_max,
            policy.bucket_bytes,
            policy.buffers,
            loader=all(view.capabilities.loader for view in views),
            targets=tuple(driver.target() for driver in self._drivers.values()),
        )

    def chunk_bytes(self, source: WeightSource) -> tuple[int, ...]:
        """Bytes of each push that is planned for a source; those of all of it if none is."""
        if self._load is None or self._load.source is not source:
            return (source.manifest.nbytes,)
        return tuple(chunk.nbytes for chunk in self._load.chunks)

    def in_place(self, source: WeightSource, *, serve: bool) -> None:
        """Weights that served are a measure for all that come after them; staged ones not yet."""
        self._staged = source.manifest
        if serve:
            self.staged_serve()

    def staged_serve(self) -> None:
        """What was put in place last serves."""
        self._reference = self._reference or self._staged

    def _hand_out(self, load: Load | None) -> None:
        self._load = load
        for driver in self._drivers.values():
            driver.load = load

    def clear(self) -> None:
        """Let go of the weights: no cycle reads them any more."""
        if self._load is not None:
            self._load.source.release()
        self._hand_out(None)
        opened, self._opened = self._opened, []
        for source in opened:
            source.close()


def can_be_asked(view: ServerView) -> bool:
    """Whether a server is in its ordinary state, with its weights resident, and can name its tensors."""
    calm = view.state is ServerState.SERVING and view.condition is Condition.HEALTHY and view.pending is None
    return calm and Tag.WEIGHTS in view.resident and view.capabilities.checksums


def server_manifest(views: Iterable[ServerView]) -> Manifest | None:
    """What the servers' model consists of, by the checkpoint that they were started from.

    None where this machine cannot read it: the first weights pushed are then what later ones are
    compared with.
    """
    for view in views:
        folder = Path(view.capabilities.model_path)
        if view.capabilities.model_path and folder.is_dir():
            try:
                with CheckpointFolder.open(folder) as checkpoint:
                    return checkpoint.manifest
            except WeightsError:
                return None  # no safetensors there, say dummy weights: nothing to compare with
    return None


def check_provable(source: WeightSource, level: VerifyLevel) -> None:
    """Whether a server's proof of these weights can be judged here.

    Raises:
        ConfigError: this source cannot say what the proof has to be.
    """
    if level is VerifyLevel.CONTENT and not isinstance(source, ProvesContent):
        raise ConfigError(
            "verify = content, and these weights have no checksums here: give torch tensors"
            " where the servers' are, CPU or GPU, or use verify = checksum"
        )
    if level is VerifyLevel.SAMPLE and shown(source) is None:
        raise ConfigError(
            "verify = sample, and the values of these weights cannot be seen here: give torch tensors or a"
            " checkpoint folder, or use verify = checksum"
        )


def check_manifest(manifest: Manifest, expected: Manifest) -> None:
    """Compare weights with the servers' model, before any byte is sent.

    Raises:
        ConfigError: a tensor is missing, unknown, or of another shape or number format.
    """
    refuse([str(difference) for difference in manifest.differences(expected)])


def refuse(differences: Sequence[str]) -> None:
    """Refuse weights that differ from the servers' model; if there is no difference, do nothing.

    Raises:
        ConfigError: there is one.
    """
    if differences:
        shown_first = " ".join(differences[:3])
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise ConfigError(
            f"the weights are not the servers' model: {shown_first}{more} Give weights of the model that the"
            " servers were started from; no weights were sent."
        )
