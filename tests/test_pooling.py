"""Pooling by mask against a plain loop, padded and flattened, and LayerPooling behind a stock Transformer."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import SENTENCES
from sentence_transformers.base.modules import Transformer
from torch import Tensor

from ilse_embed.backbone import TEXT_ONLY, LayerTransformer
from ilse_embed.pooling import LayerPooling, TokenPooler, skipped_tokens

LENGTHS = [5, 1, 0, 7, 2, 3]
WIDTH = 4


def by_hand(texts: list[Tensor], skip: int) -> Tensor:
    pooled = torch.zeros(len(texts), WIDTH)
    for row, tokens in enumerate(texts):
        counted = tokens[skip:] if len(tokens) > skip else tokens[-1:]
        for token in counted:
            pooled[row] += token / len(counted)
    return pooled


def padded(texts: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    longest = max(map(len, texts))
    hidden = torch.full((len(texts), longest, WIDTH), 1e4)  # padding that would show
    mask = torch.zeros(len(texts), longest, dtype=torch.long)
    for row, tokens in enumerate(texts):
        place = slice(0, len(tokens)) if side == "right" else slice(longest - len(tokens), longest)
        hidden[row, place], mask[row, place] = tokens, 1
    return hidden, mask


@pytest.fixture
def texts() -> list[Tensor]:
    return [torch.randn(length, WIDTH) for length in LENGTHS]


@pytest.mark.parametrize("skip", [0, 1, 2, 5, 100])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded(texts: list[Tensor], side: str, skip: int) -> None:
    hidden, mask = padded(texts, side)
    pooled = TokenPooler({"attention_mask": mask}, skip)(hidden)
    assert torch.allclose(pooled, by_hand(texts, skip), atol=1e-6)
    assert (pooled[LENGTHS.index(0)] == 0).all()


@pytest.mark.parametrize("skip", [0, 1, 2, 5, 100])
def test_flattened(texts: list[Tensor], skip: int) -> None:
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    pooled = TokenPooler({"cu_seq_lens_q": bounds}, skip)(torch.cat(texts)[None])
    assert torch.allclose(pooled, by_hand(texts, skip), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["padded", "flattened"])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype, layout: str) -> None:
    """3,000 tokens near 100 overflow a float16 sum, a bfloat16 sum stops growing, and neither can hold the mean."""
    hidden = (100 + torch.rand(1, 3000, WIDTH)).to(dtype)
    mask = {"attention_mask": torch.ones(1, 3000, dtype=torch.long)}
    features = mask if layout == "padded" else {"cu_seq_lens_q": torch.tensor([0, 3000])}
    pooled = TokenPooler(features)(hidden)
    assert pooled.dtype == torch.float32
    assert torch.allclose(pooled, hidden[0].double().mean(0, keepdim=True).float(), atol=3e-3, rtol=0)


def test_layout_must_be_told() -> None:
    with pytest.raises(KeyError, match=r"attention_mask.*cu_seq_lens_q.*input_ids"):
        TokenPooler({"input_ids": torch.ones(1, 2)})


@pytest.mark.parametrize(
    ("features", "skip_first", "include_prompt", "expected"),
    [
        ({}, False, True, 0),
        ({}, True, True, 1),
        ({"prompt_length": 5}, False, True, 0),
        ({"prompt_length": 5}, True, True, 1),
        ({"prompt_length": 5}, False, False, 5),
        ({"prompt_length": 5}, True, False, 5),  # the BOS is counted in the prompt's length
        ({"prompt_length": 0}, True, False, 1),
        ({}, True, False, 1),
        ({"prompt_length": torch.tensor([5, 5])}, False, False, 5),  # as the trainer's collator hands it over
    ],
)
def test_skipped_tokens(features: dict, skip_first: bool, include_prompt: bool, expected: int) -> None:
    assert skipped_tokens(features, skip_first=skip_first, include_prompt=include_prompt) == expected


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "bloom"])
@pytest.mark.parametrize(("pooling", "skip_first"), [("mean", False), ("mean_without_first", True)])
def test_layer_pooling_behind_a_stock_transformer(
    tiny_backbone: Callable[..., Path], tmp_path: Path, name: str, pooling: str, skip_first: bool
) -> None:
    folder = str(tiny_backbone(name))
    stock = Transformer(
        folder,
        config_kwargs={"output_hidden_states": True},
        modality_config=TEXT_ONLY,
        module_output_name="token_embeddings",
    )
    if stock.tokenizer.pad_token is None:
        stock.tokenizer.pad_token = stock.tokenizer.eos_token
    LayerPooling(skip_first=skip_first, include_prompt=False).save(str(tmp_path))
    layer_pooling = LayerPooling.load(str(tmp_path))
    assert (layer_pooling.skip_first, layer_pooling.include_prompt) == (skip_first, False)

    backbone = LayerTransformer(folder, pooling=pooling, include_prompt=False)
    for prompt in (None, "query:"):
        with torch.no_grad():
            expected = layer_pooling(stock(stock.preprocess(SENTENCES, prompt=prompt)))["layer_embeddings"]
        got = backbone(backbone.preprocess(SENTENCES, prompt=prompt))["layer_embeddings"]
        assert got.shape == (len(SENTENCES), 4, 32)
        assert torch.allclose(got, expected, atol=1e-5)


def test_layer_pooling_without_hidden_states() -> None:
    with pytest.raises(ValueError, match="output_hidden_states"):
        LayerPooling()({"attention_mask": torch.ones(1, 2)})
