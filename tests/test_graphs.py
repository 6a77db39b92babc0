"""Layer graphs against brute force, networkx and the group they come from."""

from itertools import product

import networkx as nx
import numpy as np
import pytest

from ilse_embed.graphs import (
    TOPOLOGIES,
    LayerGraph,
    Matrix,
    assign_nodes,
    build_graph,
    cayley_graph,
    cayley_modulus,
    sl2_elements,
    sl2_order,
)

ORDERS = {2: 6, 3: 24, 4: 48, 5: 120, 6: 144, 7: 336, 8: 384, 9: 648, 10: 720, 11: 1320, 12: 1152}
DIAMETERS = {2: 3, 3: 4, 4: 6, 5: 6, 6: 6}


def multiply(x: Matrix, y: Matrix, n: int) -> Matrix:
    a, b, c, d = (np.reshape(x, (2, 2)) @ np.reshape(y, (2, 2)) % n).flatten().tolist()
    return a, b, c, d


def neighbours(graph: LayerGraph) -> dict[int, set[int]]:
    of: dict[int, set[int]] = {node: set() for node in range(graph.num_nodes)}
    for u, v in graph.edges:
        of[u].add(v)
        of[v].add(u)
    return of


@pytest.mark.parametrize("n", ORDERS)
def test_group(n: int) -> None:
    elements = sl2_elements(n)
    assert sl2_order(n) == ORDERS[n] == len(elements) == len(set(elements))
    assert all((a * d - b * c) % n == 1 for a, b, c, d in elements)
    assert all(0 <= entry < n for element in elements for entry in element)
    assert elements[0] == (1, 0, 0, 1)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8, 9])
def test_group_is_all_matrices_of_determinant_one(n: int) -> None:
    brute = {m for m in product(range(n), repeat=4) if (m[0] * m[3] - m[1] * m[2]) % n == 1}
    assert set(sl2_elements(n)) == brute
    assert sl2_order(n) == len(brute)


@pytest.mark.parametrize("n", ORDERS)
def test_cayley_graph(n: int) -> None:
    graph = cayley_graph(n)
    simple = graph.to_networkx()
    degree = 2 if n == 2 else 4
    assert graph.num_nodes == simple.number_of_nodes() == ORDERS[n]
    assert {d for _, d in simple.degree} == {degree}
    assert len(graph.edges) == ORDERS[n] * degree // 2
    assert nx.is_connected(simple)
    assert nx.is_bipartite(simple) == (n % 2 == 0)
    if n in DIAMETERS:
        assert nx.diameter(simple) == DIAMETERS[n]


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_cayley_graph_joins_what_a_generator_joins(n: int) -> None:
    elements = sl2_elements(n)
    generators = [(1, 1, 0, 1), (1, 0, 1, 1), (1, n - 1, 0, 1), (1, 0, n - 1, 1)]
    of = neighbours(cayley_graph(n))
    for node, element in enumerate(elements):
        assert {elements[other] for other in of[node]} == {multiply(element, s, n) for s in generators}


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_cayley_graph_looks_the_same_from_every_node(n: int) -> None:
    """Multiplying by a group element from the left moves the identity to any node and keeps every edge."""
    elements = sl2_elements(n)
    number = {element: node for node, element in enumerate(elements)}
    edges = set(cayley_graph(n).edges)
    for node, element in enumerate(elements):
        moved = [number[multiply(element, other, n)] for other in elements]
        assert moved[0] == node
        assert {(min(moved[u], moved[v]), max(moved[u], moved[v])) for u, v in edges} == edges


def test_numbering_is_breadth_first() -> None:
    distance = nx.single_source_shortest_path_length(cayley_graph(4).to_networkx(), 0)
    in_order = [distance[node] for node in range(48)]
    assert in_order == sorted(in_order)


def test_smallest_graph_for_every_depth() -> None:
    """Sizes are not monotone in n, so the smallest n with enough nodes is not always the smallest graph."""
    orders = {n: sl2_order(n) for n in range(2, 40)}
    for num_layers in range(1, 1401):
        smallest = min(order for order in orders.values() if order >= num_layers)
        assert orders[cayley_modulus(num_layers)] == smallest, num_layers
    known = {1: 2, 6: 2, 7: 3, 24: 3, 25: 4, 48: 4, 49: 5, 720: 10, 721: 12, 1152: 12, 1153: 11, 1320: 11, 1321: 14}
    assert {num_layers: cayley_modulus(num_layers) for num_layers in known} == known


@pytest.mark.parametrize("multiplicity", [1, 2, 3])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("num_layers", [1, 2, 7, 25])
def test_every_topology(topology: str, num_layers: int, multiplicity: int) -> None:
    graph = build_graph(topology, num_layers, seed=3, multiplicity=multiplicity)
    assert graph.num_nodes >= num_layers
    assert list(graph.edges) == sorted({(u, v) for u, v in graph.edges if u < v})  # each once, smaller first

    adjacency = graph.adjacency()
    assert adjacency.dtype == np.float32
    assert (adjacency == adjacency.T).all()
    assert (np.diag(adjacency) == 0).all()
    assert set(np.unique(adjacency)) <= {0, multiplicity}

    edge_index = graph.edge_index()
    assert edge_index.dtype == np.int64
    assert edge_index.shape == (2, 2 * multiplicity * len(graph.edges))
    counted = np.zeros_like(adjacency)
    np.add.at(counted, tuple(edge_index), 1)
    assert (counted == adjacency).all()


def test_edges_of_the_plain_topologies() -> None:
    assert build_graph("path", 4).edges == ((0, 1), (1, 2), (2, 3))
    assert build_graph("complete", 4).edges == ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
    assert build_graph("empty", 4).edges == ()
    assert build_graph("cayley", 25) == cayley_graph(4)


@pytest.mark.parametrize("n", [3, 4, 5])
def test_doubled_edges_of_the_authors(n: int) -> None:
    assert cayley_graph(n, multiplicity=2).edge_index().shape[1] == 8 * sl2_order(n)


@pytest.mark.parametrize(("num_layers", "degree"), [(5, 2), (7, 4), (31, 4)])
def test_random_regular_is_the_control_of_cayley(num_layers: int, degree: int) -> None:
    graph = build_graph("random_regular", num_layers, seed=1)
    assert graph.num_nodes == build_graph("cayley", num_layers).num_nodes
    assert {d for _, d in graph.to_networkx().degree} == {degree}
    assert graph == build_graph("random_regular", num_layers, seed=1)
    assert graph.edges != build_graph("random_regular", num_layers, seed=2).edges


@pytest.mark.parametrize(("num_layers", "num_nodes"), [(1, 1), (1, 6), (25, 48), (48, 48)])
def test_assignment(num_layers: int, num_nodes: int) -> None:
    assert assign_nodes(num_layers, num_nodes, None) == list(range(num_layers))
    drawn = assign_nodes(num_layers, num_nodes, 7)
    assert len(set(drawn)) == len(drawn) == num_layers
    assert set(drawn) <= set(range(num_nodes))
    assert all(type(node) is int for node in drawn)  # goes into config.json
    assert assign_nodes(num_layers, num_nodes, 7) == drawn
    if num_layers > 1:
        assert assign_nodes(num_layers, num_nodes, 8) != drawn


def test_assignment_reaches_every_node() -> None:
    reached = {node for seed in range(300) for node in assign_nodes(3, 48, seed)}
    assert reached == set(range(48))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sl2_order(1), ["1", "n >= 2"]),
        (lambda: sl2_elements(0), ["0", "n >= 2"]),
        (lambda: cayley_graph(-3), ["-3"]),
        (lambda: cayley_modulus(0), ["num_layers is 0"]),
        (lambda: build_graph("cayley", 0), ["num_layers is 0"]),
        (lambda: build_graph("star", 5), ["'star'", "cayley", "random_regular"]),
        (lambda: build_graph("path", 5, multiplicity=0), ["multiplicity is 0"]),
        (lambda: assign_nodes(7, 6, 0), ["7 layers", "6 nodes"]),
        (lambda: assign_nodes(7, 6, None), ["7 layers", "6 nodes"]),
        (lambda: LayerGraph("loop", 3, ((1, 1),)), ["(1, 1)"]),
        (lambda: LayerGraph("backwards", 3, ((2, 1),)), ["(2, 1)"]),
        (lambda: LayerGraph("outside", 3, ((1, 3),)), ["(1, 3)", "< 3"]),
        (lambda: LayerGraph("negative", 3, ((-1, 2),)), ["(-1, 2)"]),
        (lambda: LayerGraph("twice", 3, ((0, 1), (0, 1))), ["twice"]),
    ],
)
def test_wrong_input(make, words: list[str]) -> None:
    with pytest.raises(ValueError) as raised:
        make()
    assert all(word in str(raised.value) for word in words), raised.value
