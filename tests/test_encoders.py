"""Encoders against torch-geometric's sparse operators, and what holds for all of them."""

import json
import math
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SENTENCES
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GCNConv, GINConv, global_add_pool, global_mean_pool

import ilse_embed
from ilse_embed.encoders import (
    ENCODERS,
    CayleyGNN,
    DeepSets,
    DepthWiseAttention,
    FullyConnectedGNN,
    LayerConcatenation,
    LayerEncoder,
    LayerGNN,
    LayerMLP,
    MeanOfLayers,
    ScalarMix,
    SingleLayer,
    build_encoder,
    encoder_options,
)
from ilse_embed.encoders.base import FastDropout, register
from ilse_embed.encoders.graph import NodeMixing
from ilse_embed.graphs import assign_nodes

WIDTH, HIDDEN = 12, 8


def wake(encoder: LayerEncoder) -> LayerEncoder:
    """Random values for the parameters that start at 0 or 1, as if trained."""
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if name in ("gates", "eps", "logits", "gamma") or any(p in name for p in ("norms", "bias", "vectors")):
                parameter.normal_()
    return encoder.eval()


def with_torch_geometric(encoder: LayerGNN, layers: Tensor) -> Tensor:
    """The same computation, one graph object for each text, on edge lists, as the authors' code does it."""
    graph, width = encoder.graph, encoder.hidden
    nodes = torch.zeros(len(layers), graph.num_nodes, width)
    for text in range(len(layers)):
        for layer, node in enumerate(encoder.nodes):
            nodes[text, node] = encoder.project(layers[text, layer])
    edge_index = torch.from_numpy(graph.edge_index())
    batch = Batch.from_data_list([Data(x=x, edge_index=edge_index) for x in nodes])

    states = batch.x
    for step in range(encoder.steps):
        if encoder.operator == "gin":
            conv = GINConv(deepcopy(encoder.updates[step]), train_eps=True)  # it resets what it is given
            conv.nn, conv.eps.data = encoder.updates[step], encoder.eps[step]
        else:
            conv = GCNConv(width, width)
            (linear,) = encoder.updates[step]
            conv.load_state_dict({"lin.weight": linear.weight, "bias": linear.bias})
        update = encoder.norms[step](conv(states, batch.edge_index))
        if encoder.operator == "gcn":
            update = update.relu()
        states = update if encoder.gates is None else states + encoder.gates[step] * update

    is_layer = torch.zeros(graph.num_nodes, dtype=torch.bool)
    is_layer[encoder.nodes] = True
    is_layer = is_layer.repeat(len(layers))
    pool = {"mean": global_mean_pool, "sum": global_add_pool}[encoder.pool]
    return pool(states[is_layer], batch.batch[is_layer])


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("steps", "pool", "gin_depth"), [(1, "mean", 1), (2, "sum", 2)])
@pytest.mark.parametrize("operator", ["gin", "gcn"])
@pytest.mark.parametrize("multiplicity", [1, 2])
@pytest.mark.parametrize(
    ("topology", "num_layers"),
    [
        ("cayley", 5),  # n = 2
        ("cayley", 13),  # n = 3
        ("cayley", 31),  # n = 4
        ("cayley", 81),  # n = 5
        ("complete", 7),
        ("path", 7),
        ("empty", 7),
        ("random_regular", 9),
    ],
)
def test_equals_torch_geometric(
    topology: str,
    num_layers: int,
    multiplicity: int,
    operator: str,
    steps: int,
    pool: str,
    gin_depth: int,
    residual: bool,
) -> None:
    encoder = LayerGNN(
        num_layers,
        WIDTH,
        topology=topology,
        hidden=HIDDEN,
        steps=steps,
        operator=operator,
        gin_depth=gin_depth,
        pool=pool,
        residual=residual,
        multiplicity=multiplicity,
        graph_seed=3,
    )
    wake(encoder)
    layers = torch.randn(4, num_layers, WIDTH)
    with torch.no_grad():
        got, expected = encoder.encode_layers(layers), with_torch_geometric(encoder, layers)
    scale = max(1.0, expected.abs().max().item())
    assert got.shape == (4, HIDDEN)
    assert (got - expected).abs().max().item() <= 1e-6 * scale


def test_virtual_nodes_start_at_zero() -> None:
    """A layer whose neighbours are all virtual hears nothing, although the projection has a bias."""
    encoder = wake(LayerGNN(1, WIDTH, topology="cayley", hidden=HIDDEN, residual=False))  # 5 virtual nodes
    alone = LayerGNN(1, WIDTH, topology="empty", hidden=HIDDEN, residual=False).eval()
    alone.load_state_dict(encoder.state_dict())
    layers = torch.randn(3, 1, WIDTH)
    assert torch.equal(encoder.encode_layers(layers), alone.encode_layers(layers))


@pytest.mark.parametrize("nodes", [[0, 1, 2, 3, 4], [5, 3, 1, 0, 2]])
def test_virtual_nodes_are_left_out_of_the_pool(nodes: list[int]) -> None:
    """With one step they neither speak nor are read: the graph among the layers alone gives the same."""
    encoder = wake(
        LayerGNN(5, WIDTH, hidden=HIDDEN, pool="sum", steps=1, residual=False, nodes=nodes)
    )  # 1 virtual node
    layers = torch.randn(2, 5, WIDTH)
    among = torch.from_numpy(encoder.graph.adjacency())[nodes][:, nodes]
    assert torch.equal(encoder.mixings[0].weights, among)
    states = encoder.project(layers)
    heard = torch.einsum("vu,bum->bvm", among, states) + (1 + encoder.eps[0]) * states
    expected = encoder.norms[0](encoder.updates[0](heard)).sum(1)
    assert torch.allclose(encoder.encode_layers(layers), expected, atol=1e-5)


@pytest.mark.parametrize(("nodes_out", "nodes_in"), [(7, 7), (9, 4), (4, 9)])
@pytest.mark.parametrize("density", [0.0, 0.15, 1.0])
def test_sparse_and_dense_mixing_agree(nodes_out: int, nodes_in: int, density: float) -> None:
    """Values and gradients, nodes without neighbours included."""
    weights = torch.randn(nodes_out, nodes_in) * (torch.rand(nodes_out, nodes_in) < density)
    results = []
    for sparse in (True, False):
        mixing = NodeMixing(weights)
        mixing.sparse = sparse
        states = torch.arange(nodes_in * 6.0).view(nodes_in, 2, 3).div(10).requires_grad_()
        loop = torch.tensor(1.3, requires_grad=True)
        mixed = mixing(states, loop)
        mixed.sin().sum().backward()
        results.append((mixed, states.grad, loop.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    expected = torch.einsum("vu,ubm->vbm", weights + 1.3 * torch.eye(nodes_out, nodes_in), states)
    torch.testing.assert_close(mixed, expected, atol=1e-5, rtol=1e-5)


def test_cayley_graphs_are_mixed_along_their_edges() -> None:
    assert all(mixing.sparse for mixing in CayleyGNN(31, WIDTH, hidden=HIDDEN, steps=3).mixings)
    assert not any(mixing.sparse for mixing in LayerGNN(31, WIDTH, topology="complete", hidden=HIDDEN).mixings)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.4, 0.99, 1.0])
@pytest.mark.parametrize("shape", [(201, 301), (1,), (3,), (0,)])
def test_dropout(p: float, shape: tuple[int, ...]) -> None:
    dropout = FastDropout(p)
    ones = torch.ones(shape, requires_grad=True)
    torch.manual_seed(0)
    out = dropout(ones)
    out.sum().backward()
    up = 1 / (1 - p) if p < 1 else 0.0
    assert torch.allclose(out, torch.where(out == 0, 0.0, up), rtol=1e-2)
    assert torch.equal(ones.grad, out)
    torch.manual_seed(0)
    assert torch.equal(dropout(ones), out)
    if len(out) > 200:
        assert (out == 0).float().mean().item() == pytest.approx(p, abs=0.01)
        assert out.mean().item() == pytest.approx(1 if p < 1 else 0, abs=0.05)
        rows = (out[:, :-1] == 0) & (out[:, 1:] == 0)  # neighbours share a draw, and yet are independent
        assert rows.float().mean().item() == pytest.approx(p * p, abs=0.01)
    assert torch.equal(dropout.eval()(ones), ones)


@pytest.mark.parametrize("topology", ["cayley", "complete", "path", "empty", "random_regular"])
@pytest.mark.parametrize("operator", ["gin", "gcn"])
@pytest.mark.parametrize("pool", ["weighted", "mean", "sum"])
def test_residual_encoder_starts_as_deep_sets(topology: str, operator: str, pool: str) -> None:
    graph = LayerGNN(7, WIDTH, topology=topology, hidden=HIDDEN, steps=2, operator=operator, pool=pool)
    sets = DeepSets(7, WIDTH, hidden=HIDDEN, pre=1, post=0, pool=pool)
    sets.phi.load_state_dict(graph.project.state_dict())
    layers = torch.randn(3, 7, WIDTH)
    assert torch.allclose(graph.encode_layers(layers), sets.encode_layers(layers), atol=1e-6)


def test_a_weighted_pool_by_hand() -> None:
    encoder = DeepSets(3, WIDTH, hidden=HIDDEN, pool="weighted")
    layers = torch.randn(2, 3, WIDTH)
    plain = DeepSets(3, WIDTH, hidden=HIDDEN, pool="mean")
    plain.phi.load_state_dict(encoder.phi.state_dict())
    assert torch.allclose(
        encoder.encode_layers(layers), plain.encode_layers(layers), atol=1e-6
    )  # it starts as the mean
    encoder.encode_layers(layers).pow(2).sum().backward()
    assert encoder.pool_layers.logits.grad.ne(0).all()
    with torch.no_grad():
        encoder.pool_layers.logits += torch.tensor([0.5, 0.25, 0.75]).log() / 30
    expected = (encoder.phi(layers) * torch.tensor([2 / 6, 1 / 6, 3 / 6])[:, None]).sum(1)
    assert torch.allclose(encoder.encode_layers(layers), expected, atol=1e-6)


def test_residual_gates_get_a_gradient_at_the_start() -> None:
    encoder = LayerGNN(7, WIDTH, hidden=HIDDEN, steps=2)
    encoder.encode_layers(torch.randn(3, 7, WIDTH)).pow(2).sum().backward()
    assert encoder.gates is not None
    assert encoder.gates.grad is not None
    assert encoder.gates.grad.ne(0).all()


def test_deep_sets_by_hand() -> None:
    encoder = DeepSets(3, WIDTH, hidden=HIDDEN, pre=1, post=1, pool="sum")
    layers = torch.randn(2, 3, WIDTH)
    phi, rho = encoder.phi[0], encoder.rho[0]
    expected = rho(sum(phi(layers[:, layer]).relu() for layer in range(3))).relu()
    assert torch.allclose(encoder.encode_layers(layers), expected, atol=1e-6)
    order = [2, 0, 1]
    assert torch.allclose(encoder.encode_layers(layers[:, order]), encoder.encode_layers(layers), atol=1e-6)


def test_encoders_without_training() -> None:
    layers = torch.randn(2, 3, WIDTH)
    assert torch.equal(SingleLayer(3, WIDTH).encode_layers(layers), layers[:, 2])
    assert torch.equal(SingleLayer(3, WIDTH, layer=0).encode_layers(layers), layers[:, 0])
    assert torch.equal(SingleLayer(3, WIDTH, layer=-2).encode_layers(layers), layers[:, 1])
    assert torch.allclose(
        MeanOfLayers(3, WIDTH).encode_layers(layers), (layers[:, 0] + layers[:, 1] + layers[:, 2]) / 3
    )
    assert not list(SingleLayer(3, WIDTH).parameters())
    assert SingleLayer(3, WIDTH).layer == 2  # what a report or a card says, not -1


def test_fully_connected_is_a_graph_encoder_on_the_complete_graph() -> None:
    encoder = wake(FullyConnectedGNN(7, WIDTH, hidden=HIDDEN, steps=2))
    same = LayerGNN(7, WIDTH, topology="complete", hidden=HIDDEN, steps=2).eval()
    assert encoder.get_config_dict() == same.get_config_dict()
    same.load_state_dict(encoder.state_dict())
    layers = torch.randn(2, 7, WIDTH)
    assert torch.equal(encoder.encode_layers(layers), same.encode_layers(layers))
    assert CayleyGNN(7, WIDTH).topology == LayerGNN(7, WIDTH).topology == "cayley"


def test_scalar_mix_by_hand() -> None:
    encoder, layers = ScalarMix(3, WIDTH), torch.randn(2, 3, WIDTH)
    assert torch.allclose(encoder.encode_layers(layers), layers.mean(1), atol=1e-6)
    with torch.no_grad():
        encoder.logits.copy_(torch.tensor([0.0, 1.0, 3.0]))
        encoder.gamma.fill_(-2.0)
    shares = [math.exp(w) / (1 + math.e + math.exp(3)) for w in (0, 1, 3)]
    expected = -2 * sum(share * layers[:, layer] for layer, share in enumerate(shares))
    assert torch.allclose(encoder.encode_layers(layers), expected, atol=1e-5)


@pytest.mark.parametrize(("layer", "index"), [(-1, 2), (0, 0), ("mean", None)])
def test_mlp_by_hand(layer: int | str, index: int | None) -> None:
    layers = torch.randn(2, 3, WIDTH)
    read = layers.mean(1) if index is None else layers[:, index]
    for depth in (1, 2):
        encoder = LayerMLP(3, WIDTH, layer=layer, hidden=HIDDEN, depth=depth)
        linears = [module for module in encoder.blocks if isinstance(module, nn.Linear)]
        states = read
        for linear in linears:
            states = linear(states).relu()
        assert len(linears) == depth
        assert torch.allclose(encoder.encode_layers(layers), states, atol=1e-6)
        signed = LayerMLP(3, WIDTH, layer=layer, hidden=HIDDEN, depth=depth, final_relu=False)
        signed.load_state_dict(encoder.state_dict())
        assert torch.allclose(signed.encode_layers(layers).relu(), states, atol=1e-6)
        assert signed.encode_layers(layers).min() < 0
        assert encoder.layer == ("mean" if index is None else index)


def test_concatenation_by_hand() -> None:
    encoder, layers = LayerConcatenation(3, WIDTH, hidden=HIDDEN, dropout=0.5), torch.randn(2, 3, WIDTH)
    weights = encoder.linear.weight.view(HIDDEN, 3, WIDTH)
    expected = sum(layers[:, layer] @ weights[:, layer].T for layer in range(3)) + encoder.linear.bias
    assert torch.allclose(encoder.eval().encode_layers(layers), expected, atol=1e-5)
    assert not torch.allclose(encoder.train().encode_layers(layers), expected, atol=1e-2)


@pytest.mark.parametrize("projection", [None, 7, HIDDEN])
def test_depth_wise_attention_layer_by_layer(projection: int | None) -> None:
    """Against modules of torch, a function for each layer, in a loop."""
    encoder = DepthWiseAttention(5, WIDTH, projection=projection, dropout=0.5).eval()
    for parameter in encoder.parameters():
        nn.init.normal_(parameter, std=0.5)
    width = projection or WIDTH
    half = (width + 1) // 2

    def take(stacked: nn.Module, which: int, into: nn.Module) -> nn.Module:
        weight = stacked.weight[which]
        into.load_state_dict(
            {"weight": weight.T if isinstance(into, nn.Linear) else weight[0], "bias": stacked.bias[which, 0]}
        )
        return into

    def function(stacked: nn.Sequential, which: int) -> nn.Sequential:
        down, norm, up = nn.Linear(width, half), nn.LayerNorm(half), nn.Linear(half, width)
        parts = [take(stacked[at], which, part) for at, part in ((0, down), (2, norm), (3, up))]
        return nn.Sequential(parts[0], nn.GELU(), *parts[1:])

    layers = torch.randn(4, 5, WIDTH)
    expected = []
    for text in layers:
        states = [layer if projection is None else encoder.project(layer) for layer in text]
        query = 1 + functional.elu(states[-1] + function(encoder.query, 0)(states[-1]))
        scores, values = [], []
        for layer, state in enumerate(states):
            scores.append(query @ (encoder.key.weight @ encoder.positions[layer]))
            norm = take(encoder.value[4], layer, nn.LayerNorm(width))
            values.append(norm(function(encoder.value, layer)(state)))
        shares = torch.stack(scores).softmax(0)
        expected.append(states[-1] + sum(share * value for share, value in zip(shares, values, strict=True)))
    torch.testing.assert_close(encoder.encode_layers(layers), torch.stack(expected), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(encoder.train().encode_layers(layers), torch.stack(expected), atol=1e-3)


POSITIONAL: list[tuple[str, dict[str, Any]]] = [
    ("cayley", {"steps": 2, "residual": False}),
    ("fc", {}),
    ("gnn", {"topology": "path", "operator": "gcn"}),
    ("set", {"post": 1}),
    ("set", {"pre": 2, "pool": "sum"}),
]


@pytest.mark.parametrize(("name", "options"), POSITIONAL)
def test_positional_encoder_starts_as_the_one_without(name: str, options: dict[str, Any]) -> None:
    encoders = []
    for positional in (False, True):
        torch.manual_seed(0)
        encoders.append(build_encoder(name, 7, WIDTH, hidden=HIDDEN, positional=positional, **options))
    layers = torch.randn(3, 7, WIDTH)
    assert torch.equal(encoders[0].encode_layers(layers), encoders[1].encode_layers(layers))


@pytest.mark.parametrize(("name", "options"), POSITIONAL)
def test_positions_are_added_to_the_projection(name: str, options: dict[str, Any]) -> None:
    """The same as the encoder without on layers that are shifted by what the projection makes these vectors of."""
    encoder = wake(build_encoder(name, 7, WIDTH, hidden=HIDDEN, positional=True, **options))
    state = encoder.state_dict()
    (vectors,) = (state.pop(key) for key in list(state) if "vectors" in key)
    assert vectors.shape == (7, HIDDEN)
    without = build_encoder(name, 7, WIDTH, hidden=HIDDEN, **options).eval()
    # phi's second block moves back by one where the vectors are gone
    without.load_state_dict({key.replace("phi.4", "phi.3"): value for key, value in state.items()})
    shift = vectors @ torch.linalg.pinv(state[encoder.input_weight]).T
    layers = torch.randn(3, 7, WIDTH)
    got = encoder.encode_layers(layers)
    torch.testing.assert_close(got, without.encode_layers(layers + shift), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(got, without.encode_layers(layers), atol=1e-2)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"positional": True} | options) for name, options in POSITIONAL),
        ("scalar_mix", {}),
        ("dwatt", {}),
        ("dwatt", {"projection": 6}),
        ("mlp", {"hidden": 64}),
        ("mlp", {"layer": "mean", "depth": 3, "final_relu": False}),
        ("concat", {"dropout": 0.2}),
    ],
)
def test_every_parameter_gets_a_gradient(name: str, options: dict[str, Any]) -> None:
    encoder = wake(build_encoder(name, 7, WIDTH, **options)).train()
    encoded = encoder.encode_layers(torch.randn(16, 7, WIDTH))
    (encoded * torch.randn_like(encoded)).sum().backward()
    for key, parameter in encoder.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.any(), key


@pytest.mark.parametrize("seed", [0, 5, None])
def test_assignment_decides_the_result_and_is_kept(seed: int | None, tmp_path: Path) -> None:
    """The nodes go into the config, so that another numpy cannot draw others at load."""
    encoder = wake(CayleyGNN(5, WIDTH, hidden=HIDDEN, graph_seed=seed))
    assert encoder.nodes == assign_nodes(5, 6, seed)
    layers = torch.randn(2, 5, WIDTH)
    swapped = CayleyGNN(5, WIDTH, hidden=HIDDEN, nodes=[5, 4, 3, 2, 0])
    swapped.load_state_dict(encoder.state_dict())
    assert not torch.allclose(swapped.eval().encode_layers(layers), encoder.encode_layers(layers), atol=1e-4)

    swapped.save(str(tmp_path))
    assert json.loads((tmp_path / "config.json").read_text())["nodes"] == [5, 4, 3, 2, 0]
    loaded = CayleyGNN.load(str(tmp_path)).eval()
    assert loaded.nodes == [5, 4, 3, 2, 0]
    assert torch.equal(loaded.encode_layers(layers), swapped.encode_layers(layers))


NORMED = ("cayley", "set", "mlp", "concat", "dwatt")


@pytest.mark.parametrize("name", NORMED)
def test_output_norm(name: str) -> None:
    encoder = build_encoder(name, 7, WIDTH, output_norm=True)
    embedded = encoder.encode_layers(torch.randn(5, 7, WIDTH) + 3)
    assert torch.allclose(embedded.mean(1), torch.zeros(5), atol=1e-5)
    assert torch.allclose(embedded.var(1, correction=0), torch.ones(5), atol=1e-2)
    assert encoder.norm.weight.requires_grad


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cayley", {}),
        ("gnn", {"topology": "random_regular", "graph_seed": 11, "operator": "gcn", "steps": 2, "residual": False}),
        ("gnn", {"topology": "path", "multiplicity": 2, "gin_depth": 2, "pool": "sum", "dropout": 0.3}),
        ("set", {"pre": 2, "post": 1, "pool": "sum", "dropout": 0.1}),
        ("set", {"pre": 0, "post": 1}),
        ("set", {"pre": 2, "positional": True}),
        ("fc", {"positional": True}),
        ("layer", {"layer": -3}),
        ("mean", {}),
        ("scalar_mix", {}),
        ("dwatt", {"dropout": 0.2}),
        ("dwatt", {"projection": 6}),
        ("mlp", {"layer": -3, "depth": 2, "dropout": 0.2}),
        ("mlp", {"layer": "mean", "final_relu": False}),
        ("concat", {"dropout": 0.2}),
        *((name, {"output_norm": True}) for name in NORMED),
        *((name, {"pool": "weighted"}) for name in ("cayley", "set")),
    ],
)
def test_save_and_load(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    encoder = wake(build_encoder(name, 7, WIDTH, **options))
    encoder.save(str(tmp_path))
    loaded = type(encoder).load(str(tmp_path)).eval()
    assert loaded.get_config_dict() == encoder.get_config_dict()
    assert encoder.get_config_dict().keys() == {"num_layers", "layer_width", *encoder_options(name)}
    for key, tensor in encoder.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor)
    layers = torch.randn(3, 7, WIDTH)
    got, expected = (module.encode_layers(layers) for module in (loaded, encoder))
    assert torch.equal(got, expected)
    assert got.shape == (3, encoder.get_embedding_dimension())
    assert type(encoder).__module__ == "ilse_embed"
    assert getattr(ilse_embed, type(encoder).__name__) is type(encoder)
    if encoder.state_dict():
        assert load_file(tmp_path / "model.safetensors").keys() == encoder.state_dict().keys()
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(ValueError):
            type(encoder).load(str(tmp_path))
    else:
        assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_tensors_of_another_size_are_refused(tmp_path: Path) -> None:
    DeepSets(7, WIDTH, hidden=HIDDEN).save(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_width": WIDTH + 1}))
    with pytest.raises(RuntimeError, match="size mismatch"):
        DeepSets.load(str(tmp_path))


def test_tensors_have_no_graph_in_them() -> None:
    names = set(LayerGNN(7, WIDTH, hidden=HIDDEN, steps=1).state_dict())
    assert names == {
        "project.0.weight",
        "project.0.bias",
        "eps",
        "updates.0.0.weight",
        "updates.0.0.bias",
        "norms.0.weight",
        "norms.0.bias",
        "gates",
    }


@pytest.mark.parametrize(
    "cast",
    [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double(), lambda m: m.to("cpu", torch.half)],
)
@pytest.mark.parametrize("name", ENCODERS)
def test_stays_float32(name: str, cast: Callable[[Any], Any]) -> None:
    encoder = wake(build_encoder(name, 7, WIDTH))
    before = {key: value.clone() for key, value in encoder.state_dict().items()}
    assert cast(encoder) is encoder
    tensors = [*encoder.parameters(), *encoder.buffers()]
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} <= {torch.float32}
    assert all(torch.equal(value, before[key]) for key, value in encoder.state_dict().items())


def test_follows_to_another_device() -> None:
    encoder = LayerGNN(7, WIDTH, hidden=HIDDEN).to("meta")
    assert {tensor.device.type for tensor in [*encoder.parameters(), *encoder.buffers()]} == {"meta"}


def test_follows_to_another_device_with_a_dtype_that_it_refuses() -> None:
    encoder = LayerGNN(7, WIDTH, hidden=HIDDEN).to("meta", torch.half)
    assert {(p.device.type, p.dtype) for p in encoder.parameters()} == {("meta", torch.float32)}


def test_stays_float32_behind_a_bfloat16_backbone(tiny_backbone: Callable[..., Path]) -> None:
    backbone = ilse_embed.LayerTransformer(
        str(tiny_backbone("llama")), pooling="mean", model_kwargs={"dtype": torch.bfloat16}
    )
    encoder = CayleyGNN(backbone.num_layers, 32, hidden=HIDDEN)
    model = SentenceTransformer(modules=[backbone, encoder, Normalize()], device="cpu")
    assert model.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in encoder.parameters()} == {torch.float32}
    embeddings = model.encode(list(SENTENCES), convert_to_tensor=True)
    assert embeddings.dtype == torch.float32
    assert torch.allclose(embeddings.norm(dim=1), torch.ones(len(SENTENCES)), atol=1e-6)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((2, 6, WIDTH), ["(2, 6, 12)", "7 layers"]),
        ((2, 7, 13), ["(2, 7, 13)", "width 12"]),
        ((7, WIDTH), ["(7, 12)", "7 layers of width 12"]),
        ((2, 1, WIDTH), ["(2, 1, 12)", "7 layers"]),
    ],
)
def test_wrong_shape(name: str, shape: tuple[int, ...], words: list[str]) -> None:
    with pytest.raises(ValueError) as raised:
        build_encoder(name, 7, WIDTH)({"layer_embeddings": torch.zeros(shape)})
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("star", {}, ["'star'", "cayley", "set"]),
        ("set", {"steps": 1}, ["'set'", "steps", "pre"]),
        ("cayley", {"hiden": 1}, ["hiden", "hidden"]),
        ("gnn", {"operator": "gat"}, ["'gat'", "gin", "gcn"]),
        ("gnn", {"topology": "star"}, ["'star'", "cayley"]),
        ("gnn", {"pool": "max"}, ["'max'", "mean", "sum"]),
        ("set", {"pool": "last"}, ["'last'", "mean", "sum"]),
        ("gnn", {"steps": -1}, ["steps is -1"]),
        ("gnn", {"gin_depth": 0}, ["gin_depth is 0", "at least 1"]),
        ("set", {"pre": 0, "post": 0}, ["pre and post", "0"]),
        ("set", {"pre": -1}, ["pre is -1"]),
        ("gnn", {"multiplicity": 0}, ["multiplicity is 0"]),
        ("gnn", {"nodes": [0, 1]}, ["7 distinct", "24", "[0, 1]"]),
        ("gnn", {"nodes": [0, 1, 2, 3, 4, 5, 5]}, ["7 distinct", "5, 5"]),
        ("gnn", {"nodes": [0, 1, 2, 3, 4, 5, 24]}, ["below 24"]),
        ("layer", {"layer": 7}, ["7", "0 to 6"]),
        ("layer", {"layer": -8}, ["-8", "0 to 6"]),
        ("layer", {"layer": "mean"}, ["mean", "0 to 6"]),
        ("mlp", {"layer": 7}, ["7", "0 to 6"]),
        ("mlp", {"layer": "last"}, ["'last'", '"mean"']),
        ("mlp", {"depth": 0}, ["depth is 0", "at least 1"]),
        ("set", {"pre": 0, "post": 1, "positional": True}, ["positional", "pre is 0"]),
        ("dwatt", {"projection": 0}, ["projection is 0", "at least 1"]),
        ("dwatt", {"hidden": 8}, ["'dwatt'", "hidden", "projection"]),
        ("scalar_mix", {"hidden": 8}, ["'scalar_mix'", "hidden"]),
    ],
)
def test_wrong_options(name: str, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as raised:
        build_encoder(name, 7, WIDTH, **options)
    assert all(word in str(raised.value) for word in words), raised.value


def test_a_name_is_given_once() -> None:
    with pytest.raises(ValueError, match="'set' is taken by DeepSets"):
        register("set")(DeepSets)


PYTHIA, GEMMA, LLAMA = (25, 1024), (27, 2304), (33, 4096)


@pytest.mark.parametrize(
    ("name", "shape", "options", "expected"),
    [
        ("cayley", PYTHIA, {"steps": 1}, 328_705),
        ("cayley", GEMMA, {"steps": 1}, 656_385),
        ("cayley", LLAMA, {"steps": 1}, 1_115_137),
        ("cayley", PYTHIA, {"steps": 2}, 395_010),
        ("cayley", LLAMA, {"steps": 2}, 1_181_442),
        ("cayley", PYTHIA, {"steps": 2, "gin_depth": 2}, 526_594),
        ("cayley", LLAMA, {"steps": 2, "gin_depth": 2}, 1_313_026),
        ("cayley", PYTHIA, {"steps": 1, "operator": "gcn"}, 328_704),
        ("cayley", GEMMA, {"steps": 2, "operator": "gcn"}, 722_688),
        ("set", PYTHIA, {"pre": 1, "post": 1}, 328_192),
        ("set", PYTHIA, {"pre": 0, "post": 1}, 262_400),
        ("set", LLAMA, {"pre": 1, "post": 1}, 1_114_624),
        ("fc", PYTHIA, {"steps": 1}, 328_705),  # theirs has no eps
        ("fc", LLAMA, {"steps": 2, "operator": "gcn"}, 1_181_440),
        ("mlp", PYTHIA, {"depth": 1}, 262_400),
        ("mlp", GEMMA, {"depth": 3, "layer": "mean"}, 721_664),
        ("scalar_mix", LLAMA, {}, 33 + 1),  # theirs has no gamma
        ("dwatt", PYTHIA, {}, 27_405_912),
        ("dwatt", GEMMA, {}, 148_977_288),
        ("dwatt", PYTHIA, {"projection": 256}, 2_002_520),
        ("dwatt", LLAMA, {"projection": 256}, 3_322_648),
    ],
)
def test_parameters_of_the_authors_encoders(name: str, shape: tuple[int, int], options: dict, expected: int) -> None:
    """Counts of the authors' code, docs/reference-implementation.md section 1.3; a residual gate is one more a step."""

    def count(**more: Any) -> int:
        with torch.device("cpu" if "steps" in options else "meta"):  # DWAtt has up to 149 million
            return sum(p.numel() for p in build_encoder(name, shape[0], shape[1], **options, **more).parameters())

    if "steps" in options:
        assert count(residual=False) == expected
        assert count() == expected + options["steps"]
    else:
        assert count() == expected
