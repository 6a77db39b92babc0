"""Graph neural networks over the layers. The graph is the same for every text, so one batched operation serves all."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch_geometric.nn import DenseGCNConv, DenseGINConv

from ilse_embed.encoders.base import LAYER_POOLS, LayerEncoder, check_options, dense_blocks, register
from ilse_embed.graphs import LayerGraph, assign_nodes, build_graph


@register("gnn")
class LayerGNN(LayerEncoder):
    """Message passing between layers on a fixed graph, then a pool over the layers.

    ``h_0 = Dropout(ReLU(W z + b))`` for the L layers and 0 for virtual nodes; then K times
    ``h_k = Dropout(act(LayerNorm(Conv(h_{k-1}))))``, or with ``residual`` ``h_k = h_{k-1} + g_k (...)`` with a trained
    scalar ``g_k`` that starts at 0, so that the encoder starts as a DeepSets and can fall back to it.

    ``Conv`` is GIN, ``MLP((1 + eps) h_v + sum over neighbours h_u)`` with a trained eps and ``act`` the identity (its
    MLP ends in ReLU), or GCN with self loops and symmetric normalisation and ``act`` = ReLU.

    Source: arXiv 2603.22665; GIN: arXiv 1810.00826, eq. 4.1; GCN: arXiv 1609.02907, eq. 2.
    """

    __module__ = "ilse_embed"
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
        "multiplicity",
        "graph_seed",
        "nodes",
    ]

    adjacency: Tensor
    node_index: Tensor

    def __init__(
        self,
        num_layers: int,
        layer_width: int,
        topology: str = "cayley",
        hidden: int = 256,
        steps: int = 1,
        operator: str = "gin",
        gin_depth: int = 1,
        pool: str = "mean",
        dropout: float = 0.0,
        residual: bool = True,
        multiplicity: int = 1,
        graph_seed: int | None = 0,
        nodes: list[int] | None = None,
    ) -> None:
        """Set graph and sizes.

        Args:
            num_layers: Layers L.
            layer_width: Backbone width d.
            topology: One of `ilse_embed.graphs.TOPOLOGIES`.
            hidden: Embedding width m.
            steps: Message-passing steps K.
            operator: "gin" or "gcn".
            gin_depth: Linear + ReLU pairs in the MLP of a GIN step.
            pool: "mean" or "sum" over the layers; virtual nodes are left out.
            dropout: Probability after the projection and after each step.
            residual: Whether each step adds to what was there instead of replacing it.
            multiplicity: How often each edge counts; 2 is the authors' code for n >= 3.
            graph_seed: Draws the node of each layer (and a random graph); None puts layer l on node l.
            nodes: The node of each layer; given when an artifact is loaded, else drawn.

        Raises:
            ValueError: If an option is not among the allowed ones, or ``nodes`` does not fit the graph.
        """
        super().__init__(num_layers, layer_width)
        check_options(pool=pool, steps=steps, gin_depth=gin_depth)
        if operator not in ("gin", "gcn"):
            raise ValueError(f'operator is {operator!r}; allowed are "gin" and "gcn"')
        self.topology, self.hidden, self.steps, self.operator, self.gin_depth = (
            topology,
            hidden,
            steps,
            operator,
            gin_depth,
        )
        self.pool, self.dropout, self.residual = pool, dropout, residual
        self.multiplicity, self.graph_seed = multiplicity, graph_seed
        self.graph: LayerGraph = build_graph(topology, num_layers, seed=graph_seed or 0, multiplicity=multiplicity)
        self.nodes = assign_nodes(num_layers, self.graph.num_nodes, graph_seed) if nodes is None else nodes
        if len(set(self.nodes)) != num_layers or not all(0 <= node < self.graph.num_nodes for node in self.nodes):
            raise ValueError(
                f"nodes must be {num_layers} distinct numbers below {self.graph.num_nodes}; got {self.nodes}"
            )
        self.register_buffer("adjacency", torch.from_numpy(self.graph.adjacency()), persistent=False)
        self.register_buffer("node_index", torch.tensor(self.nodes), persistent=False)

        self.project = dense_blocks(layer_width, hidden, 1, dropout)
        self.convs = nn.ModuleList(self._operator() for _ in range(steps))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(steps))
        self.after = nn.Sequential(nn.Identity() if operator == "gin" else nn.ReLU(), nn.Dropout(dropout))
        self.gates = nn.Parameter(torch.zeros(steps)) if residual else None

    def _operator(self) -> nn.Module:
        if self.operator == "gcn":
            return DenseGCNConv(self.hidden, self.hidden)
        return DenseGINConv(dense_blocks(self.hidden, self.hidden, self.gin_depth, 0.0), train_eps=True)

    def encode_layers(self, layers: Tensor) -> Tensor:
        """Project, pass messages, pool.

        Shapes:
            layers: (B, L, d) -> (B, m)
        """
        projected = self.project(layers)  # (B, L, m): virtual nodes carry no input and are not projected
        states = projected.new_zeros(len(layers), self.graph.num_nodes, self.hidden)
        states = states.index_copy(1, self.node_index, projected)  # (B, N, m)
        for step, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            update = self.after(norm(conv(states, self.adjacency)))
            states = update if self.gates is None else states + self.gates[step] * update
        return LAYER_POOLS[self.pool](states.index_select(1, self.node_index))

    def get_embedding_dimension(self) -> int:
        """Embedding width m."""
        return self.hidden


@register("cayley")
class CayleyGNN(LayerGNN):
    """Cayley-Encoder: a `LayerGNN` on the smallest Cayley graph of SL(2, Z_n) with at least L nodes."""

    __module__ = "ilse_embed"
