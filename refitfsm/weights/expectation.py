"""What an SGLang server has to report if it holds the weights that this process has.

    expectation = expect(tensors, reported)
    wrong = compare(expectation, reported)

`reported` are the `checksums` of one rank in an answer of `/weights_checker`. Give the tensors as they were
pushed, on the kind of device that the server's are on, in the number format that the server holds them in: a
server that was sent float32 and holds bfloat16 has other bytes, and other checksums. With
`--rl-on-policy-target` SGLang holds norms in float32.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from refitfsm.weights.fusion import Cut, Heads, Recipe, Server, derive
from refitfsm.weights.hashing import NBYTES_MAX, hash_all
from refitfsm.weights.manifest import Manifest
from refitfsm.weights.torch_checks import spec_of

if TYPE_CHECKING:
    import torch


class Expectation(NamedTuple):
    """The checksums of one rank of a server, as far as they are known."""

    checksums: Mapping[str, str]
    """By the server's names. If none is unknown, `hashing.overall` of them is its `per_gpu_checksum`."""
    unknown: tuple[str, ...]
    """The server's tensors of which this process cannot say what they are made from."""
    uncovered: tuple[str, ...] = ()
    """What was pushed and none of `checksums` is made from, by its own names."""


def expect(
    named: "Mapping[str, torch.Tensor]",
    server_names: Iterable[str],
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    heads: Heads | None = None,
    experts_as_loaded: bool = False,
) -> Expectation:
    """The checksums that one rank of a server has to report for the tensors that it names.

    On a GPU the tensors are hashed where they are; at most one of the server's is put together at a time.
    What `heads` and `experts_as_loaded` are for, `fusion.Server` says.

    Raises:
        WeightsError: there is no such rank, a tensor is not simply its elements, or there are two devices.
    """
    manifest = Manifest(tuple(spec_of(name, tensor) for name, tensor in named.items()))
    on_cpu = all(tensor.device.type == "cpu" for tensor in named.values())
    server = Server(tp_rank, tp_size, heads, on_cpu, experts_as_loaded)
    derivation = derive(manifest, server_names, server)
    parts = {name: _parts(recipe, named) for name, recipe in derivation.recipes.items()}
    sizes = {name: sum(part.nbytes for part in pieces) for name, pieces in parts.items()}
    large = [name for name, nbytes in sizes.items() if nbytes > NBYTES_MAX and not on_cpu]
    for name in large:
        del parts[name]
    checksums = dict(zip(parts, hash_all(list(parts.values())), strict=True))
    covered = {piece.name for name in parts for piece in derivation.recipes[name].pieces}
    uncovered = tuple(name for name in named if name not in covered)
    return Expectation(checksums, (*derivation.unknown, *large), uncovered)


def compare(expectation: Expectation, reported: Mapping[str, str]) -> tuple[str, ...]:
    """The tensors that differ, by the server's names, in order; empty if all that is known is equal.

    A tensor differs, too, if it is missing from either side.
    """
    expected, unknown = expectation.checksums, frozenset(expectation.unknown)
    names = (expected.keys() | reported.keys()) - unknown
    return tuple(sorted(name for name in names if expected.get(name) != reported.get(name)))


def _parts(recipe: Recipe, named: "Mapping[str, torch.Tensor]") -> "list[torch.Tensor]":
    parts = [_cut(named[piece.name].detach(), piece.cut) for piece in recipe.pieces]
    if recipe.zero_rows:
        parts.append(parts[0].new_zeros((recipe.zero_rows, *parts[0].shape[1:])))
    return parts


def _cut(tensor: "torch.Tensor", cut: Cut | None) -> "torch.Tensor":
    """A view of the part."""
    return tensor if cut is None else tensor.narrow(cut.dim, cut.start, cut.stop - cut.start)
