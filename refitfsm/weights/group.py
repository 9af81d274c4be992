"""Many trainer ranks push to one fleet: each server's rank maps memory of the trainer rank on its own GPU.

One rank, the leader, has the `Fleet` and gives it a `GroupSource`. The others `follow`. For each chunk the
leader asks whether all ranks are there; then all gather it, those on the server's GPUs encode it, and the
leader puts the entries into the server's order. When the server has answered, they settle what they lent.

    group = RankGroup.from_default()
    weights = Gatherer(model.state_dict())
    if group.rank == group.leader:
        with GroupSource(group, weights, timeout_s=60) as source:
            fleet.refit(source, version)
            source.close(version)
    else:
        version = follow(group, weights, timeout_s=60)

The ranks speak through a key-value store and never meet in a barrier: a rank that raises, ends or is late
is named by a `GroupError`, on every rank, in bounded time.

- `group_leader`, `group_follow`: the two sides. `group_rank`: what both do at an order.
- `group_board`: the words, and the store they are written to. `group_ask`: an order and all its reports.
- `group_turns`: which server is served next. `group_hand`: work that may never return.
- `gather`: a rank's tensors, whole ones a chunk at a time.
"""

from refitfsm.weights.group_base import Encode, GroupError, KeyValueStore, LocalEntry, RankGroup
from refitfsm.weights.group_follow import GroupFollower, follow
from refitfsm.weights.group_leader import GroupOffer, GroupSource

__all__ = [
    "Encode",
    "GroupError",
    "GroupFollower",
    "GroupOffer",
    "GroupSource",
    "KeyValueStore",
    "LocalEntry",
    "RankGroup",
    "follow",
]
