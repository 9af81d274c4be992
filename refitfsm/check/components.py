"""Strongly connected components: which steps lead round, and which never come back."""

from collections.abc import Sequence


def components(edges: Sequence[Sequence[int]]) -> list[int]:
    """The number of each node's strongly connected component. Edges are given by the node they begin at.

    Tarjan's algorithm, with a stack of its own: ways are longer than Python's.
    """
    order, low, found = [0] * len(edges), [0] * len(edges), [-1] * len(edges)
    path: list[int] = []
    opened = closed = 0
    for root in range(len(edges)):
        calls = [] if order[root] else [(root, iter(edges[root]))]
        while calls:
            node, ahead = calls[-1]
            if not order[node]:
                opened += 1
                order[node] = low[node] = opened
                path.append(node)
            for to in ahead:
                if not order[to]:
                    calls.append((to, iter(edges[to])))
                    break
                if found[to] < 0:
                    low[node] = min(low[node], order[to])
            else:
                calls.pop()
                if calls:
                    low[calls[-1][0]] = min(low[calls[-1][0]], low[node])
                if low[node] == order[node]:
                    while found[node] < 0:
                        found[path.pop()] = closed
                    closed += 1
    return found
