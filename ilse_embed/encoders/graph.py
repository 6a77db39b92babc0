"""Graph neural networks over the layers. The graph is the same for every text, so one batched operation serves all."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ilse_embed.encoders.base import (
    FastDropout,
    LayerEncoder,
    LayerPool,
    LayerPositions,
    check_options,
    dense_blocks,
    last_norm,
    register,
)
from ilse_embed.graphs import LayerGraph, assign_nodes, build_graph

SPARSE_BELOW = 0.3
"""Share of non-zero weights below which a CPU sums over neighbours faster than it multiplies by the whole matrix."""


class NodeMixing(nn.Module):
    """Weighted sums over the neighbours of each node, the same graph for every text.

    ``out_v = sum over u of weights[v, u] x_u``, plus ``loop x_v`` where v is among both.

    A sparse graph is summed along its edges on a CPU; a dense one, and any on a GPU, is one matrix product. Nodes come
    first, so that each node's row holds all texts and nothing is rearranged.
    """

    weights: Tensor
    loops: Tensor
    source: Tensor
    starts: Tensor
    edge_weights: Tensor
    edge_loops: Tensor

    def __init__(self, weights: Tensor) -> None:
        """Prepare the sums.

        Args:
            weights: (O, I), from I nodes to O; node v of the one is node v of the other.
        """
        super().__init__()
        nodes_out, nodes_in = weights.shape
        loops = torch.eye(nodes_out, nodes_in)
        target, source = (weights + loops).nonzero().T
        self.sparse = len(target) < SPARSE_BELOW * weights.numel()
        starts = torch.bincount(target, minlength=nodes_out).cumsum(0).roll(1)
        starts[0] = 0
        buffers = {"weights": weights, "loops": loops, "source": source.contiguous(), "starts": starts}
        buffers |= {"edge_weights": weights[target, source], "edge_loops": loops[target, source]}
        for name, value in buffers.items():
            self.register_buffer(name, value, persistent=False)

    def forward(self, states: Tensor, loop: Tensor | float = 0.0) -> Tensor:
        """Sum.

        Shapes:
            states: (I, B, m), loop: scalar -> (O, B, m)
        """
        flat = states.reshape(len(states), -1)
        if self.sparse and flat.device.type == "cpu":
            weights = self.edge_weights + loop * self.edge_loops
            mixed = nn.functional.embedding_bag(self.source, flat, self.starts, mode="sum", per_sample_weights=weights)
        else:
            mixed = (self.weights + loop * self.loops) @ flat
        return mixed.view(-1, *states.shape[1:])


def pad_nodes(states: Tensor, nodes: int) -> Tensor:
    """Append nodes of zeros, or drop the last ones.

    Shapes:
        states: (I, B, m) -> (nodes, B, m)
    """
    return states if len(states) == nodes else nn.functional.pad(states, (0, 0, 0, 0, 0, nodes - len(states)))


@register("gnn")
class LayerGNN(LayerEncoder):
    """Message passing between layers on a fixed graph, then a pool over the layers.

    ``h_0 = Dropout(ReLU(W z + b))`` for the L layers and 0 for virtual nodes; then K times
    ``h_k = Dropout(act(LayerNorm(Conv(h_{k-1}))))``, or with ``residual`` ``h_k = h_{k-1} + g_k (...)`` with a trained
    scalar ``g_k`` that starts at 0, so that the encoder starts as a DeepSets and can fall back to it. With
    ``positional`` each layer adds a trained vector to its ``W z + b``; it too starts at 0.

    ``Conv`` is GIN, ``MLP((1 + eps) h_v + sum over neighbours h_u)`` with a trained eps and ``act`` the identity (its
    MLP ends in ReLU), or GCN with self loops and symmetric normalisation and ``act`` = ReLU.

    Source: arXiv 2603.22665; GIN: arXiv 1810.00826, eq. 4.1; GCN: arXiv 1609.02907, eq. 2.
    """

    __module__ = "ilse_embed"
    default_topology = "cayley"
    config_keys = [  # noqa: RUF012
        "num_layers",
        "layer_width",
        "topology",
        "hidden",
        "steps",
        "operator",
        "gin_depth",
        "pool",
        "dropout",
        "residual",
        "positional",
        "output_norm",
        "multiplicity",
        "graph_seed",
        "nodes",
    ]

    def __init__(
        self,
        num_layers: int,
        layer_width: int,
        topology: str | None = None,
        hidden: int = 256,
        steps: int = 1,
        operator: str = "gin",
        gin_depth: int = 1,
        pool: str = "mean",
        dropout: float = 0.0,
        residual: bool = True,
        positional: bool = False,
        output_norm: bool = False,
        multiplicity: int = 1,
        graph_seed: int | None = 0,
        nodes: list[int] | None = None,
    ) -> None:
        """Set graph and sizes.

        Args:
            num_layers: Layers L.
            layer_width: Backbone width d.
            topology: One of `ilse_embed.graphs.TOPOLOGIES`; None: ``default_topology`` of the class.
            hidden: Embedding width m.
            steps: Message-passing steps K.
            operator: "gin" or "gcn".
            gin_depth: Linear + ReLU pairs in the MLP of a GIN step.
            pool: Over the layers, see `LayerPool`; virtual nodes are left out.
            dropout: Probability after the projection and after each step.
            residual: Whether each step adds to what was there instead of replacing it.
            positional: Whether a trained vector for each layer is added to its projection.
            output_norm: Whether a layer norm with trained scale and shift ends the encoder.
            multiplicity: How often each edge counts; 2 is the authors' code for n >= 3.
            graph_seed: Draws the node of each layer (and a random graph); None puts layer l on node l.
            nodes: The node of each layer; given when an artifact is loaded, else drawn.

        Raises:
            ValueError: If an option is not among the allowed ones, or ``nodes`` does not fit the graph.
        """
        super().__init__(num_layers, layer_width)
        check_options(pool=pool, steps=steps)
        if gin_depth < 1:
            raise ValueError(f"gin_depth is {gin_depth}; it must be at least 1")
        if operator not in ("gin", "gcn"):
            raise ValueError(f'operator is {operator!r}; allowed are "gin" and "gcn"')
        self.topology = topology = self.default_topology if topology is None else topology
        self.hidden, self.steps, self.operator, self.gin_depth = hidden, steps, operator, gin_depth
        self.pool, self.dropout, self.residual, self.positional = pool, dropout, residual, positional
        self.output_norm, self.multiplicity, self.graph_seed = output_norm, multiplicity, graph_seed
        self.graph: LayerGraph = build_graph(topology, num_layers, seed=graph_seed or 0, multiplicity=multiplicity)
        self.nodes = assign_nodes(num_layers, self.graph.num_nodes, graph_seed) if nodes is None else nodes
        if len(set(self.nodes)) != num_layers or not all(0 <= node < self.graph.num_nodes for node in self.nodes):
            raise ValueError(
                f"nodes must be {num_layers} distinct numbers below {self.graph.num_nodes}; got {self.nodes}"
            )
        self.project = dense_blocks(layer_width, hidden, 1, dropout)
        if positional:
            self.project.insert(1, LayerPositions(num_layers, hidden))
        self.mixings = nn.ModuleList(NodeMixing(weights) for weights in self._weights())
        self.eps = nn.Parameter(torch.zeros(steps)) if operator == "gin" else None
        self.updates = nn.ModuleList(self._update() for _ in range(steps))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(steps))
        self.after = nn.Sequential(nn.Identity() if operator == "gin" else nn.ReLU(), FastDropout(dropout))
        self.gates = nn.Parameter(torch.zeros(steps)) if residual else None
        self.pool_layers = LayerPool(pool, num_layers)
        self.norm = last_norm(hidden, output_norm)

    def _weights(self) -> list[Tensor]:
        """Of each step, from the nodes that hold something to those that matter; the layers are the first L nodes.

        Virtual nodes hold nothing before the first step, and nobody reads them after the last.
        """
        virtual = sorted(set(range(self.graph.num_nodes)) - set(self.nodes))
        order = [*self.nodes, *virtual]
        weights = torch.from_numpy(self.graph.adjacency())[order][:, order]
        if self.operator == "gcn":
            weights = weights + torch.eye(len(weights))
            scale = weights.sum(1).rsqrt()
            weights = scale[:, None] * weights * scale
        sizes = [self.num_layers, *[len(order)] * (self.steps - 1), self.num_layers]
        return [weights[:out, :into] for into, out in pairwise(sizes)] if self.steps else []

    def _update(self) -> nn.Sequential:
        if self.operator == "gin":
            return dense_blocks(self.hidden, self.hidden, self.gin_depth, 0.0)
        linear = nn.Linear(self.hidden, self.hidden)
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
        return nn.Sequential(linear)

    @property
    def input_weight(self) -> str:
        """Name of the weight that reads the layers."""
        return "project.0.weight"

    def encode_layers(self, layers: Tensor) -> Tensor:
        """Project, pass messages, pool.

        Shapes:
            layers: (B, L, d) -> (B, m)
        """
        states = self.project(layers).transpose(0, 1).contiguous()  # (L, B, m)
        for step in range(self.steps):
            update = self.after(self.norms[step](self._pass_messages(step, states)))  # (L or N, B, m)
            if self.gates is not None:  # virtual nodes appear with 0 and are dropped at the end
                update = pad_nodes(states, len(update)) + self.gates[step] * update
            states = update
        fused: Tensor = self.norm(self.pool_layers(states))
        return fused

    def _pass_messages(self, step: int, states: Tensor) -> Tensor:
        """``update(mixing(states))``; where mixing makes more nodes of fewer, its linear map is applied before it.

        Shapes:
            states: (I, B, m) -> (O, B, m)
        """
        loop = 0.0 if self.eps is None else 1 + self.eps[step]
        mixing: Any = self.mixings[step]
        update: Any = self.updates[step]
        linear, *rest = update
        if mixing.weights.shape[0] > len(states):
            states = mixing(nn.functional.linear(states, linear.weight), loop) + linear.bias
        else:
            states = linear(mixing(states, loop))
        for module in rest:
            states = module(states)
        return states

    def get_embedding_dimension(self) -> int:
        """Embedding width m."""
        return self.hidden


@register("cayley")
class CayleyGNN(LayerGNN):
    """Cayley-Encoder: a `LayerGNN` on the smallest Cayley graph of SL(2, Z_n) with at least L nodes."""

    __module__ = "ilse_embed"


@register("fc")
class FullyConnectedGNN(LayerGNN):
    """FC-Encoder: a `LayerGNN` on the complete graph, where every layer hears every other in one step."""

    __module__ = "ilse_embed"
    default_topology = "complete"
