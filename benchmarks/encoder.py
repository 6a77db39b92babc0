"""A training step of the Cayley-Encoder, against torch-geometric, other ways to pass messages, and its matrix products.

    OMP_NUM_THREADS=1 python -m benchmarks.encoder [--device cuda] [--compile] [--quick]

A step is: gather the batch from the table of layer features, forward, backward, AdamW. K = 2 GIN steps, m = 256. Forms:
the paper's encoder without dropout and with 0.1, and with our path past the message passing. All contenders of a case
take turns in one process; times are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GINConv, global_mean_pool
from torch_geometric.nn.conv import SimpleConv

from benchmarks.common import this_run, write_result
from ilse_embed.encoders import CayleyGNN
from ilse_embed.graphs import LayerGraph

HIDDEN, STEPS = 256, 2
FORMS: dict[str, dict[str, Any]] = {
    "paper, no dropout": {"residual": False},
    "paper": {"residual": False, "dropout": 0.1},
    "residual": {"residual": True},
}

LAYERS = {24: 19, 48: 31, 120: 81}
"""Layers L of a backbone for each graph size N."""


class PerTextGraphs(nn.Module):
    """The method as the paper describes it: a graph object for each text, collated, virtual nodes masked at the end."""

    def __init__(self, encoder: CayleyGNN) -> None:
        """Take the graph of an encoder."""
        super().__init__()
        self.project = nn.Sequential(nn.Linear(encoder.layer_width, HIDDEN), nn.ReLU(), nn.Dropout(encoder.dropout))
        self.dropout = nn.Dropout(encoder.dropout)
        self.convs = nn.ModuleList(
            GINConv(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU()), train_eps=True) for _ in range(STEPS)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(STEPS))
        self.graph: LayerGraph = encoder.graph
        self.nodes = torch.tensor(encoder.nodes)

    def graphs(self, table: Tensor) -> list[Data]:
        """A graph object for each text; made once, outside of the time measured."""
        edge_index = torch.from_numpy(self.graph.edge_index()).to(table.device)
        real = torch.zeros(self.graph.num_nodes, dtype=torch.bool, device=table.device)
        real[self.nodes.to(table.device)] = True
        data = []
        for layers in table:
            x = layers.new_zeros(self.graph.num_nodes, layers.shape[1])
            x[self.nodes.to(table.device)] = layers
            data.append(Data(x=x, edge_index=edge_index, real=real))
        return data

    def forward(self, batch: Batch) -> Tensor:
        """A batch of graphs -> (B, m)."""
        states = self.project(batch.x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            states = self.dropout(norm(conv(states, batch.edge_index)))
        return global_mean_pool(states[batch.real], batch.batch[batch.real], batch.num_graphs)


class Gather(nn.Module):
    """Neighbours fetched by index, one neighbour of all nodes at a time."""

    def __init__(self, weights: Tensor) -> None:
        """Rows of neighbours, filled up with a node of zeros."""
        super().__init__()
        self.weights, (self.out, self.into) = weights, weights.shape
        degree = int((weights != 0).sum(1).max())
        neighbours = torch.full((self.out, degree), self.into)
        for node in range(self.out):
            found = weights[node].nonzero().flatten()
            neighbours[node, : len(found)] = found
        self.register_buffer("neighbours", neighbours.T.contiguous(), persistent=False)

    def forward(self, states: Tensor, loop: Tensor) -> Tensor:
        """(I, B, m) -> (O, B, m)."""
        filled = nn.functional.pad(states, (0, 0, 0, 0, 0, max(1, self.out - self.into)))
        mixed = loop * filled[: self.out]
        for column in self.neighbours:
            mixed = mixed + filled.index_select(0, column)
        return mixed


class Sparse(nn.Module):
    """A sparse matrix product."""

    def __init__(self, weights: Tensor) -> None:
        """The weights as CSR."""
        super().__init__()
        self.weights = weights
        self.matrix = weights.to_sparse_csr()

    def forward(self, states: Tensor, loop: Tensor) -> Tensor:
        """(I, B, m) -> (O, B, m)."""
        out, into = self.matrix.shape
        flat = states.reshape(into, -1)
        mixed = torch.sparse.mm(self.matrix, flat).view(out, *states.shape[1:])
        return mixed + loop * nn.functional.pad(states, (0, 0, 0, 0, 0, out - into))


class SharedEdges(nn.Module):
    """torch-geometric's message passing over edges that all texts share."""

    def __init__(self, weights: Tensor) -> None:
        """The edges."""
        super().__init__()
        self.weights = weights
        self.conv = SimpleConv(aggr="sum", node_dim=0)
        self.register_buffer("edges", weights.nonzero().T.flip(0).contiguous(), persistent=False)

    def forward(self, states: Tensor, loop: Tensor) -> Tensor:
        """(I, B, m) -> (O, B, m)."""
        out, into = self.weights.shape
        target = nn.functional.pad(states, (0, 0, 0, 0, 0, out - into))
        return self.conv((states, target), self.edges) + loop * target


def variants(encoder: CayleyGNN, device: str, compiled: bool) -> dict[str, nn.Module]:
    """The encoder with each way to pass messages."""

    def with_mixing(make: Callable[[Tensor], nn.Module]) -> CayleyGNN:
        other = CayleyGNN(**encoder.get_config_dict())
        other.mixings = nn.ModuleList(make(mixing.weights.cpu()) for mixing in encoder.mixings)
        for mixing in other.mixings:
            mixing.weights = mixing.weights.to(device)
            if isinstance(mixing, Sparse):
                mixing.matrix = mixing.matrix.to(device)
        return other.to(device)

    dense = CayleyGNN(**encoder.get_config_dict()).to(device)
    for mixing in dense.mixings:
        mixing.sparse = False
    found: dict[str, nn.Module] = {
        "ours": encoder,
        "dense": dense,
        "gather": with_mixing(Gather),
        "sparse": with_mixing(Sparse),
        "torch-geometric, shared edges": with_mixing(SharedEdges),
    }
    if compiled:
        whole = CayleyGNN(**encoder.get_config_dict()).to(device)
        whole.encode_layers = torch.compile(whole.encode_layers)  # type: ignore[method-assign]
        found["torch.compile"] = whole
    return found


def products(encoder: CayleyGNN, batch: int, device: str) -> Callable[[], None]:
    """The dense matrix products that a step cannot do without: linear maps, forward and backward."""
    rows, width, layers = batch * encoder.num_layers, encoder.layer_width, encoder.num_layers
    features, states = torch.randn(rows, width, device=device), torch.randn(rows, HIDDEN, device=device)
    project, update = (torch.randn(HIDDEN, size, device=device) for size in (width, HIDDEN))
    assert all(min(mixing.weights.shape) == layers for mixing in encoder.mixings)  # linear maps on L nodes

    def run() -> None:
        features @ project.T
        states.T @ features
        for _ in range(STEPS):
            states @ update.T
            states.T @ states
            states @ update

    return run


def step(model: nn.Module, forward: Callable[[Tensor], Tensor], texts: int, batch: int) -> Callable[[], None]:
    """One training step on a random batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run() -> None:
        loss = forward(torch.randint(texts, (batch,))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return run


def medians(contenders: dict[str, Callable[[], Any]], repeats: int, device: str) -> dict[str, float]:
    """Milliseconds of each, in turns."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(repeats + 2):
        for name, run in contenders.items():
            started = time.perf_counter()
            run()
            if device != "cpu":
                torch.accelerator.synchronize()
            if number >= 2:
                times[name].append(1000 * (time.perf_counter() - started))
    return {name: round(statistics.median(values), 3) for name, values in times.items()}


def measure(nodes: int, batch: int, width: int, form: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One case: milliseconds of a training step and of the forward pass alone."""
    device = arguments.device
    torch.manual_seed(0)
    encoder = CayleyGNN(LAYERS[nodes], width, hidden=HIDDEN, steps=STEPS, **FORMS[form]).to(device)
    texts = 2 * batch
    table = torch.randn(texts, LAYERS[nodes], width, device=device)
    baseline = PerTextGraphs(encoder).to(device)
    graphs = baseline.graphs(table)
    one_case = (nodes, batch, form) == (48, 64, "paper")  # compiling takes minutes on a CPU
    models = variants(encoder, device, arguments.compile and one_case)

    def ours(model: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda rows: model.encode_layers(table.index_select(0, rows.to(device)))  # type: ignore[operator]

    def theirs(rows: Tensor) -> Tensor:
        return baseline(Batch.from_data_list([graphs[row] for row in rows.tolist()]))

    steps = {name: step(model, ours(model), texts, batch) for name, model in models.items()}
    steps["torch-geometric, a graph for each text"] = step(baseline, theirs, texts, batch)
    steps["matrix products alone"] = products(encoder, batch, device)
    training = medians(steps, arguments.repeats, device)
    rows = torch.randint(texts, (batch,))
    with torch.inference_mode():
        runs: dict[str, Callable[[], Any]] = {name: lambda m=m: ours(m)(rows) for name, m in models.items()}
        runs["torch-geometric, a graph for each text"] = lambda: theirs(rows)
        forward = medians(runs, arguments.repeats, device)
    case = {
        "nodes": nodes,
        "layers": LAYERS[nodes],
        "batch": batch,
        "width": width,
        "form": form,
        "times_faster_than_torch_geometric": round(
            training["torch-geometric, a graph for each text"] / training["ours"], 2
        ),
        "share_of_time_in_matrix_products": round(training["matrix products alone"] / training["ours"], 2),
        "training_step_ms": training,
        "forward_ms": forward,
    }
    print({key: value for key, value in case.items() if not key.endswith("_ms")}, flush=True)
    return case


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true", help="torch.compile too (minutes on a CPU)")
    parser.add_argument("--quick", action="store_true", help="N = 48 and B = 64 alone")
    parser.add_argument("--repeats", type=int, default=11)
    arguments = parser.parse_args()
    nodes, batches, widths = ([48], [64], [576, 1024]) if arguments.quick else (LAYERS, [64, 256], [576, 1024, 4096])
    cases = [
        measure(n, batch, width, form, arguments)
        for n in nodes
        for width in widths
        for batch in batches
        for form in FORMS
    ]
    device = "cpu" if arguments.device == "cpu" else torch.cuda.get_device_name()
    name = f"encoder-{device.replace(' ', '-')}"
    print(write_result(name, {"run": this_run(), "device": device, "threads": torch.get_num_threads(), "cases": cases}))


if __name__ == "__main__":
    main()
