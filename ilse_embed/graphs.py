"""Layer graphs: which layers of the backbone exchange messages.

A layer graph is fixed for a backbone: it depends on the number of layers alone, never on a text. Letters: ``L`` layers,
``N`` graph nodes (``N >= L``), ``E`` undirected edges.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import networkx as nx
import numpy as np
from numpy.typing import NDArray

Matrix = tuple[int, int, int, int]


@dataclass(frozen=True)
class LayerGraph:
    """An undirected graph over ``num_nodes`` nodes with each edge listed once, as ``(u, v)`` with ``u < v``.

    Attributes:
        name: What the graph is, for example ``"cayley(4)"``.
        num_nodes: Number of nodes N.
        edges: The E edges, sorted.
        multiplicity: How often each edge counts in a sum over neighbours. 1 is the simple graph. The authors' code adds
            every edge of a Cayley graph with n >= 3 twice (n = 2: four times).
    """

    name: str
    num_nodes: int
    edges: tuple[tuple[int, int], ...]
    multiplicity: int = 1

    def __post_init__(self) -> None:
        """Refuse loops, repeated edges and nodes that do not exist.

        Raises:
            ValueError: If an edge is not ``0 <= u < v < num_nodes``, occurs twice, or ``multiplicity`` is below 1.
        """
        for u, v in self.edges:
            if not 0 <= u < v < self.num_nodes:
                raise ValueError(
                    f"edge {(u, v)} is not 0 <= u < v < {self.num_nodes}; list each edge once, smaller first"
                )
        if len(set(self.edges)) != len(self.edges):
            raise ValueError("an edge is listed twice; list it once and set multiplicity instead")
        if self.multiplicity < 1:
            raise ValueError(f"multiplicity is {self.multiplicity}; it must be at least 1")

    def adjacency(self) -> NDArray[np.float32]:
        """Symmetric adjacency without self loops.

        Returns:
            Array ``(N, N)``, ``multiplicity`` where an edge is, else 0.
        """
        adjacency = np.zeros((self.num_nodes, self.num_nodes), dtype=np.float32)
        for u, v in self.edges:
            adjacency[u, v] = adjacency[v, u] = self.multiplicity
        return adjacency

    def edge_index(self) -> NDArray[np.int64]:
        """Directed edges in the form of torch-geometric.

        Returns:
            Array ``(2, 2 * multiplicity * E)``.
        """
        once = np.array(self.edges, dtype=np.int64).reshape(-1, 2).T
        return np.tile(np.concatenate([once, once[::-1]], axis=1), self.multiplicity)

    def to_networkx(self) -> nx.Graph:
        """The simple graph (multiplicity ignored) for networkx's algorithms."""
        graph = nx.Graph(self.edges)
        graph.add_nodes_from(range(self.num_nodes))
        return graph


def sl2_order(n: int) -> int:
    """Number of 2x2 integer matrices of determinant 1 modulo ``n``: ``n^3 prod_{p | n} (1 - p^-2)``, p prime.

    Raises:
        ValueError: If ``n < 2``.
    """
    if n < 2:
        raise ValueError(f"n is {n}; SL(2, Z_n) needs n >= 2")
    order, rest, prime = n**3, n, 2
    while rest > 1:
        if rest % prime == 0:
            order = order // prime**2 * (prime**2 - 1)
            while rest % prime == 0:
                rest //= prime
        prime += 1
    return order


def sl2_elements(n: int) -> list[Matrix]:
    """The elements ``(a, b, c, d)`` of SL(2, Z_n) breadth first from the identity along the generators.

    Raises:
        ValueError: If ``n < 2``.
    """
    sl2_order(n)  # refuses n < 2
    identity = (1, 0, 0, 1)
    seen, queue = {identity}, [identity]
    for element in queue:
        for neighbour in _neighbours(element, n):
            if neighbour not in seen:
                seen.add(neighbour)
                queue.append(neighbour)
    return queue


def cayley_graph(n: int, multiplicity: int = 1) -> LayerGraph:
    """Cayley graph of SL(2, Z_n) for the generators [[1,1],[0,1]], [[1,0],[1,1]] and their inverses.

    4-regular for ``n >= 3``, a cycle of 6 nodes for ``n = 2``; vertex-transitive, connected, an expander. Node 0 is the
    identity and nodes are numbered breadth first from it.

    Args:
        n: Modulus, at least 2.
        multiplicity: See `LayerGraph`.

    Raises:
        ValueError: If ``n < 2`` or ``multiplicity < 1``.

    Source: arXiv 2603.22665, section "Cayley-Encoder".
    """
    elements = sl2_elements(n)
    number = {element: node for node, element in enumerate(elements)}
    edges = {
        (min(u, v), max(u, v))
        for element, u in number.items()
        for v in map(number.__getitem__, _neighbours(element, n))
    }
    return LayerGraph(f"cayley({n})", len(elements), tuple(sorted(edges)), multiplicity)


def cayley_modulus(num_layers: int) -> int:
    """The modulus whose Cayley graph has the fewest nodes among those with at least ``num_layers``.

    The order of SL(2, Z_n) is not monotone in n, so sizes are compared, not moduli.

    Raises:
        ValueError: If ``num_layers < 1``.
    """
    if num_layers < 1:
        raise ValueError(f"num_layers is {num_layers}; a layer graph needs at least one layer")
    best: int | None = None
    for n in count(2):
        # n^3 prod (1 - p^-2) > n^3 * 6 / pi^2 > 0.6 n^3, so beyond this no larger modulus can give a smaller graph.
        if best is not None and 0.6 * n**3 >= sl2_order(best):
            return best
        if sl2_order(n) >= num_layers and (best is None or sl2_order(n) < sl2_order(best)):
            best = n
    raise AssertionError("unreachable")


def _neighbours(element: Matrix, n: int) -> tuple[Matrix, Matrix, Matrix, Matrix]:
    """The element times each generator: right multiplication adds or subtracts one column to the other."""
    a, b, c, d = element
    return (
        (a, (a + b) % n, c, (c + d) % n),
        (a, (b - a) % n, c, (d - c) % n),
        ((a + b) % n, b, (c + d) % n, d),
        ((a - b) % n, b, (c - d) % n, d),
    )


def _cayley(num_layers: int, seed: int, multiplicity: int) -> LayerGraph:
    return cayley_graph(cayley_modulus(num_layers), multiplicity)


def _complete(num_layers: int, seed: int, multiplicity: int) -> LayerGraph:
    edges = tuple((u, v) for u in range(num_layers) for v in range(u + 1, num_layers))
    return LayerGraph("complete", num_layers, edges, multiplicity)


def _empty(num_layers: int, seed: int, multiplicity: int) -> LayerGraph:
    return LayerGraph("empty", num_layers, (), multiplicity)


def _path(num_layers: int, seed: int, multiplicity: int) -> LayerGraph:
    return LayerGraph("path", num_layers, tuple((u, u + 1) for u in range(num_layers - 1)), multiplicity)


def _random_regular(num_layers: int, seed: int, multiplicity: int) -> LayerGraph:
    """Random regular graph with the size and the degree of the Cayley graph for as many layers: its control."""
    num_nodes = sl2_order(cayley_modulus(num_layers))
    degree = 4 if num_nodes > 6 else 2
    graph = nx.random_regular_graph(degree, num_nodes, seed=seed)
    edges = tuple(sorted((min(edge), max(edge)) for edge in graph.edges))
    return LayerGraph(f"random_regular({degree})", num_nodes, edges, multiplicity)


TOPOLOGIES: dict[str, Callable[[int, int, int], LayerGraph]] = {
    "cayley": _cayley,
    "complete": _complete,
    "empty": _empty,
    "path": _path,
    "random_regular": _random_regular,
}
"""Topologies by name; each takes (num_layers, seed, multiplicity)."""


def build_graph(topology: str, num_layers: int, *, seed: int = 0, multiplicity: int = 1) -> LayerGraph:
    """Smallest graph of a topology with at least ``num_layers`` nodes.

    Args:
        topology: One of `TOPOLOGIES`.
        num_layers: Number of layers L, at least 1.
        seed: Draws the edges of ``random_regular``; the other topologies ignore it.
        multiplicity: See `LayerGraph`.

    Raises:
        ValueError: If the topology is unknown or ``num_layers < 1``.
    """
    if topology not in TOPOLOGIES:
        raise ValueError(f"topology is {topology!r}; allowed are {json.dumps(sorted(TOPOLOGIES))}")
    if num_layers < 1:
        raise ValueError(f"num_layers is {num_layers}; a layer graph needs at least one layer")
    return TOPOLOGIES[topology](num_layers, seed, multiplicity)


def assign_nodes(num_layers: int, num_nodes: int, seed: int | None) -> list[int]:
    """The node of each layer; the nodes left over are virtual nodes.

    Args:
        num_layers: Number of layers L.
        num_nodes: Number of nodes N >= L.
        seed: Draws a random injection; None keeps the numbering of the graph (layer l on node l), as the authors' code.

    Returns:
        L distinct node numbers.

    Raises:
        ValueError: If ``num_nodes < num_layers``.
    """
    if num_nodes < num_layers:
        raise ValueError(
            f"{num_layers} layers do not fit on {num_nodes} nodes; take a graph with at least as many nodes"
        )
    if seed is None:
        return list(range(num_layers))
    return [int(node) for node in np.random.default_rng(seed).permutation(num_nodes)[:num_layers]]
