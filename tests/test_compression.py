"""Layers in fewer dimensions: what is kept, and that a trained encoder needs no trace of it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import SENTENCES

from ilse_embed import LayerTransformer, build, build_encoder, load
from ilse_embed.compression import LayerBasis
from ilse_embed.extraction import extract
from ilse_embed.features import LayerTable
from ilse_embed.recipes import RECIPES, Recipe
from ilse_embed.scoring import trained_score
from ilse_embed.store import FeatureStore
from ilse_embed.tasks import Labelled, Task
from ilse_embed.training import initial_parts, train

LAYERS, WIDTH = 4, 32


def sample(texts: int = 200) -> torch.Tensor:
    """Layers of norms far apart, each with an offset, correlated with each other as those of a residual stream."""
    torch.manual_seed(0)
    shared = torch.randn(texts, 1, 6) @ torch.randn(6, WIDTH)
    scale = torch.tensor([0.1, 1.0, 10.0, 1000.0])[:, None]
    return (shared + 0.1 * torch.randn(texts, LAYERS, WIDTH)) * scale + 5 * scale


@pytest.mark.parametrize("width", [1, 6, WIDTH])
def test_directions(width: int) -> None:
    layers = sample()
    basis = LayerBasis.fit(layers, width)
    assert basis.directions.shape == (WIDTH, width)
    torch.testing.assert_close(basis.directions.T @ basis.directions, torch.eye(width), atol=1e-5, rtol=0)
    standardised = (layers - layers.mean(0)) / layers.std(0, unbiased=False)
    torch.testing.assert_close(basis.compress(layers), standardised @ basis.directions, atol=1e-3, rtol=1e-3)
    moments = standardised.flatten(0, 1).T.double() @ standardised.flatten(0, 1).double()
    kept = basis.compress(layers).double().pow(2).sum()
    largest = torch.linalg.eigvalsh(moments).flip(0)[:width].sum()
    assert kept.item() == pytest.approx(largest.item(), rel=1e-4)  # no other directions keep more
    if width == 6:
        assert kept / moments.trace() > 0.95


def test_the_same_file_again(tmp_path: Path) -> None:
    first, again = (LayerBasis.fit(sample(), 5) for _ in range(2))
    assert first.to_bytes() == again.to_bytes()
    path = tmp_path / "basis.safetensors"
    path.write_bytes(first.to_bytes())
    loaded = LayerBasis.load(path)
    assert torch.equal(loaded.compress(sample()), first.compress(sample())) and loaded.digest == first.digest


@pytest.mark.parametrize("position", [0, 9, 40, 150, 400, -1])
def test_a_damaged_file(tmp_path: Path, position: int) -> None:
    path = tmp_path / "basis.safetensors"
    content = bytearray(LayerBasis.fit(sample(), 5).to_bytes())
    content[position] ^= 4
    path.write_bytes(content)
    with pytest.raises(Exception, match=r".") as error:
        LayerBasis.load(path)
    assert not isinstance(error.value, AssertionError)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cayley", {"steps": 2, "dropout": 0.3}),
        ("gnn", {"topology": "path", "operator": "gcn"}),
        ("set", {"pre": 1, "post": 1}),
        ("set", {"pre": 0, "post": 1, "pool": "sum"}),
        ("set", {"pre": 2, "positional": True, "output_norm": True}),
        ("fc", {"positional": True}),
        ("dwatt", {"projection": 6, "output_norm": True}),
        ("mlp", {"depth": 2}),
        ("mlp", {"layer": "mean", "final_relu": False}),
        ("concat", {"dropout": 0.3}),
    ],
)
def test_an_encoder_takes_the_compression_in(name: str, options: dict) -> None:
    layers = sample()
    basis = LayerBasis.fit(layers, 5)
    narrow = build_encoder(name, LAYERS, 5, **options).eval()
    for parameter in narrow.parameters():
        if not parameter.any():  # gates and positions, which start at 0
            torch.nn.init.normal_(parameter)
    wide = narrow.widened(basis.directions)
    assert (wide.layer_width, narrow.layer_width, wide.training) == (WIDTH, 5, False)
    standardised = basis.scaling.scale_layers(layers)
    torch.testing.assert_close(
        wide.encode_layers(standardised), narrow.encode_layers(basis.compress(layers)), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("name", ["layer", "mean", "scalar_mix", "dwatt"])
def test_encoders_without_a_linear_map(name: str) -> None:
    with pytest.raises(ValueError, match="has no linear map of the layers that could undo a compression"):
        build_encoder(name, LAYERS, 5).widened(torch.zeros(WIDTH, 5))


@pytest.fixture
def task() -> Task:
    texts = [f"{word} {number}" for number in range(40) for word in ("ship", "tomato")]
    labels = [text.split()[0] for text in texts]
    cut = {"train": slice(0, 48), "validation": slice(48, 64), "test": slice(64, 80)}
    return Task(
        "words",
        "classification",
        {split: Labelled(texts[rows], labels[rows]) for split, rows in cut.items()},  # type: ignore[misc]
        None,
        "made up",
    )


@pytest.mark.parametrize("name", ["cayley", "set"])
def test_trained_on_compressed_layers(
    tiny_backbone: Callable[..., Path], task: Task, tmp_path: Path, name: str
) -> None:
    """The saved model reads raw hidden states and predicts what the compressed features gave."""
    backbone = LayerTransformer(str(tiny_backbone()))
    store = FeatureStore.for_backbone(tmp_path / "store", backbone, compress=6)
    table = extract(backbone, task.texts(), store)
    assert table.layers.shape == (80, LAYERS, 6) and table.basis is not None
    trained = train(task, table, name, Recipe(hidden=8, epochs=4))
    assert trained.scaling is None and trained.provenance["compressed"] == 6
    expected = trained_score(trained, task, table, "test")
    model = build(backbone, **trained.parts)
    model.save(str(tmp_path / "model"))
    loaded = load(tmp_path / "model")
    test = task.splits["test"]
    right = sum(one == label for one, label in zip(loaded.predict(test.texts), test.labels, strict=True))
    assert 100 * right / len(test.texts) == pytest.approx(expected)
    compressed = trained.encoder.encode_layers(table.select(SENTENCES[:0] + tuple(test.texts)))
    found = torch.nn.functional.normalize(compressed, dim=-1).detach().numpy()
    assert loaded.encode(test.texts) == pytest.approx(found, abs=1e-4)
    assert table.layers.nbytes * 5 < extract(backbone, task.texts()).layers.nbytes


@pytest.mark.parametrize(
    ("encoder", "recipe", "words"),
    [("cayley", RECIPES["paper"], "the recipe wants raw ones"), ("layer", Recipe(), "has no linear map")],
)
def test_what_compressed_layers_are_not_for(task: Task, encoder: str, recipe: Recipe, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        initial_parts(task, (LAYERS, 5), encoder, recipe, compressed=True)
    basis = LayerBasis.fit(sample(), 5)
    rows = {text: row for row, text in enumerate(task.texts())}
    with pytest.raises(ValueError, match=words):
        train(task, LayerTable(rows, torch.randn(80, LAYERS, 5), basis=basis), encoder, recipe)
