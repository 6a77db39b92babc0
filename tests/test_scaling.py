"""Per-layer standardisation."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ilse_embed.scaling import LayerScaling

LAYERS, WIDTH = 3, 5


@pytest.fixture
def table() -> Tensor:
    """Layers whose norms differ by orders of magnitude, each dimension with its own mean, as in an LLM."""
    spread = torch.tensor([0.01, 1.0, 3000.0])[:, None] * torch.rand(LAYERS, WIDTH).add(0.5)
    return torch.randn(200, LAYERS, WIDTH) * spread + 5 * spread * torch.randn(LAYERS, WIDTH)


def test_mean_zero_and_spread_one(table: Tensor) -> None:
    scaled = LayerScaling.fit(table).scale_layers(table)
    assert scaled.shape == table.shape
    assert scaled.dtype == torch.float32
    assert scaled.mean(0).abs().max() < 1e-4
    assert (scaled.std(0, unbiased=False) - 1).abs().max() < 1e-4
    other = torch.randn(4, LAYERS, WIDTH)  # other texts get the statistics of the training texts
    expected = (other - table.mean(0)) / table.std(0, unbiased=False)
    assert torch.allclose(LayerScaling.fit(table).scale_layers(other), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_of_a_half_precision_table(table: Tensor, dtype: torch.dtype) -> None:
    half = table.to(dtype)
    assert torch.allclose(LayerScaling.fit(half).mean, LayerScaling.fit(half.float()).mean)
    assert LayerScaling.fit(half).mean.dtype == torch.float32


@pytest.mark.parametrize("value", [0.0, 0.1, -1234.567, 1e-30, 1e30])
def test_constant_dimension(table: Tensor, value: float) -> None:
    """Becomes 0, not infinite and not noise; the other dimensions do not notice."""
    table[:, 1, 2] = value
    scaling = LayerScaling.fit(table)
    scaled = scaling.scale_layers(table)
    assert scaling.scale[1, 2] == 1
    assert scaled[:, 1, 2].abs().max() <= abs(value) * 1e-6
    assert torch.isfinite(scaled).all()
    assert (scaled[:, 1, 3].std(unbiased=False) - 1).abs() < 1e-4


def test_starts_as_the_identity(table: Tensor) -> None:
    assert torch.equal(LayerScaling(LAYERS, WIDTH).scale_layers(table), table)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_is_refused(table: Tensor, value: float) -> None:
    table[17, 2, 4] = value
    with pytest.raises(ValueError, match=r"layer 2 .*not finite"):
        LayerScaling.fit(table)


@pytest.mark.parametrize("shape", [(1, LAYERS, WIDTH), (0, LAYERS, WIDTH), (200, WIDTH), (2, 200, LAYERS, WIDTH)])
def test_wrong_table(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError) as raised:
        LayerScaling.fit(torch.zeros(shape))
    assert str(shape) in str(raised.value)


@pytest.mark.parametrize("shape", [(2, LAYERS + 1, WIDTH), (2, 1, WIDTH), (2, LAYERS, 1), (LAYERS, WIDTH)])
def test_wrong_features(table: Tensor, shape: tuple[int, ...]) -> None:
    """Some of these would broadcast in silence."""
    with pytest.raises(ValueError) as raised:
        LayerScaling.fit(table)({"layer_embeddings": torch.zeros(shape)})
    assert str(shape) in str(raised.value)
    assert f"{LAYERS} layers of width {WIDTH}" in str(raised.value)


def test_save_and_load(table: Tensor, tmp_path: Path) -> None:
    scaling = LayerScaling.fit(table)
    scaling.save(str(tmp_path))
    loaded = LayerScaling.load(str(tmp_path))
    features = {"layer_embeddings": table, "other": 1}
    assert torch.equal(loaded(features)["layer_embeddings"], scaling.scale_layers(table))
    assert features["other"] == 1
    assert loaded.state_dict().keys() == {"mean", "scale"}
    assert LayerScaling.__module__ == "ilse_embed"


def test_nothing_is_trained_and_float32_stays(table: Tensor) -> None:
    scaling = LayerScaling.fit(table)
    mean = scaling.mean.clone()
    assert not list(scaling.parameters())
    assert torch.equal(scaling.half().mean, mean)
