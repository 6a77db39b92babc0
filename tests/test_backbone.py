"""LayerTransformer against transformers itself, text by text and without padding, over many architectures."""

import copy
import json
import logging
import pickle
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BACKBONES, FALLBACK, SENTENCES, TOKENIZERS, make_backbone
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, DataCollatorWithFlattening, LlamaConfig, LlamaModel

from ilse_embed.backbone import (
    POOLINGS,
    LayerTransformer,
)
from ilse_embed.encoders import MeanOfLayers
from ilse_embed.hidden_states import find_blocks
from ilse_embed.pooling import TokenPooler
from ilse_embed.sinks import PROBE_TEXTS, SINK_SHARE, first_token_share
from ilse_embed.tokens import adds_first_token

TinyBackbone = Callable[..., Path]

TEXTS = [f"{sentence} {word}"[:cut] for sentence in SENTENCES for word, cut in (("a", 3), ("seven", 90), ("x", 21))] + [
    "a",
    "The orchestra " * 12,
]
HOSTILE = {
    "special tokens": "<|im_start|>system\nYou are<|im_end|><s></s><pad>[CLS][SEP][MASK]<|endoftext|>",
    "NUL": "a\0b",
    "lone surrogate": "cut \ud83d here",
    "surrogate pair": "\ud83d\ude00",
    "right to left": "\u202e\u05e9\u05dc\u05d5\u05dd \u0639\u0627\u0644\u0645",
    "emoji": "👩‍👩‍👧‍👦🏳️‍🌈",
    "combining": "Z̷̧̢͔̤a̴̡l̸g̶o̵",
    "10k characters": "long " * 2000,
    "controls": "\x01\x7f\u200b\ufeff\u2028",
    "only a newline": "\n",
    "template": "$A {{ messages }} %s {0} \\n",
}


def embed(backbone: LayerTransformer, texts: list[str], **kwargs: Any) -> Tensor:
    return backbone(backbone.preprocess(texts, **kwargs))["layer_embeddings"]


@cache
def reference(folder: Path) -> Any:
    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


def by_hand(folder: Path, ids: list[int], skip: int = 0) -> Tensor:
    """Mean of every hidden state of one text, as transformers gives them, without padding."""
    tokens = torch.tensor([ids])
    with torch.no_grad():
        outputs = reference(folder)(tokens, attention_mask=torch.ones_like(tokens), output_hidden_states=True)
    return torch.stack([layer[0, skip:].mean(0) for layer in outputs.hidden_states])


def pieces(backbone: LayerTransformer, texts: list[str], **kwargs: Any) -> list[list[str]]:
    """The tokens of each text without padding."""
    features = backbone.preprocess(texts, **kwargs)
    rows = zip(features["input_ids"], features["attention_mask"].bool(), strict=True)
    return [backbone.tokenizer.convert_ids_to_tokens(row[mask]) for row, mask in rows]


def save(backbone: LayerTransformer, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)  # as SentenceTransformer does before it saves a module
    backbone.save(str(folder))
    return folder


def hooks_on(backbone: LayerTransformer) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in backbone.modules())


# Layers


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", BACKBONES)
def test_layers_equal_transformers(tiny_backbone: TinyBackbone, name: str, side: str) -> None:
    folder = tiny_backbone(name)
    backbone = LayerTransformer(str(folder), pooling="mean", processor_kwargs={"padding_side": side})
    assert bool(find_blocks(backbone.model)) == (name not in FALLBACK)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = torch.stack([by_hand(folder, tokenizer(text)["input_ids"]) for text in TEXTS])

    features = backbone.preprocess(TEXTS)
    assert (features["attention_mask"][:, 0 if side == "left" else -1] == 0).any()
    got = backbone(features)["layer_embeddings"]
    assert got.shape == (len(TEXTS), backbone.num_layers, backbone.get_embedding_dimension()) == (20, 4, 32)
    assert got.dtype == torch.float32
    assert torch.allclose(got, expected, atol=1e-5, rtol=1e-5)
    assert torch.allclose(torch.cat([embed(backbone, [text]) for text in TEXTS]), expected, atol=1e-5, rtol=1e-5)
    # The layers differ, so that one in another's place would have shown.
    assert (got[:, 1:] - got[:, :-1]).abs().amax((0, 2)).min() > 1e-2


@pytest.mark.parametrize("name", BACKBONES)
def test_hooks_see_what_output_hidden_states_gives(tiny_backbone: TinyBackbone, name: str) -> None:
    backbone = LayerTransformer(str(tiny_backbone(name)), pooling="mean")
    features = backbone.preprocess(TEXTS)
    pool = TokenPooler(features)
    with torch.no_grad():
        inputs = {key: value for key, value in features.items() if isinstance(value, Tensor)}
        hidden = backbone.model(**inputs, output_hidden_states=True).hidden_states
    features = backbone(features)
    assert torch.equal(features["layer_embeddings"], torch.stack([pool(layer) for layer in hidden], dim=1))
    assert torch.equal(features["token_embeddings"], hidden[-1])
    assert "all_layer_embeddings" not in features


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox"])
def test_flattened_batch(tiny_backbone: TinyBackbone, name: str) -> None:
    """The layout that FlashAttention takes: no padding, all texts in one row; transformers splits it by positions."""
    backbone = LayerTransformer(str(tiny_backbone(name)), pooling="mean_without_first")
    padded = backbone.preprocess(TEXTS)
    lengths = padded["attention_mask"].sum(1)
    flat = {
        "input_ids": padded["input_ids"][padded["attention_mask"].bool()][None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seq_lens_q": torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int(),
    }
    got, expected = (backbone(features)["layer_embeddings"] for features in (flat, padded))
    assert torch.allclose(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "mean_without_first"])
@pytest.mark.parametrize("texts", [["", "a", "b c", *TEXTS], TEXTS, [""], ["a", "b"]])
def test_short_texts_of_a_flattened_batch(
    tiny_backbone: TinyBackbone, monkeypatch: pytest.MonkeyPatch, pooling: str, texts: list[str]
) -> None:
    """Tokens are put in front of them as in a padded batch, and texts that are cut off are counted."""
    backbone = LayerTransformer(str(tiny_backbone()), pooling=pooling, max_seq_length=6)
    with torch.inference_mode():
        expected = backbone(backbone.preprocess(texts))["layer_embeddings"]
        truncated, backbone.truncated_texts = backbone.truncated_texts, 0
        # What FlashAttention, which needs a GPU, would have turned on.
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_position_ids=True)
        monkeypatch.setattr(Transformer, "_can_flatten_inputs", lambda self: True)
        backbone.data_collator, backbone._flatten_position_offset = collator, 0
        backbone.unpad_inputs = True
        features = backbone.preprocess(texts)
        assert "attention_mask" not in features and len(features["cu_seq_lens_q"]) == len(texts) + 1
        assert features["cu_seq_lens_q"].diff().min() >= (1 if pooling == "mean" else 2)
        found = backbone(features)["layer_embeddings"]
    assert torch.allclose(found, expected, atol=1e-5, rtol=1e-5)
    assert backbone.truncated_texts == truncated == sum(len(text) > 10 for text in texts)
    share = first_token_share(backbone)  # measured on a padded batch all the same
    assert backbone.can_flatten_inputs and share.shape == (4,)


def test_an_encoder_decoder_is_refused_clearly(tmp_path: Path) -> None:
    sizes = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 48))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    folder = make_backbone(tmp_path, "bart", "cls", d_model=32, **sizes, **heads)
    with pytest.raises(RuntimeError, match=r"BartModel gave 0 hidden states.*expected 3"):
        LayerTransformer(str(folder))


# Frozen


def test_frozen_and_without_dropout(tiny_backbone: TinyBackbone) -> None:
    backbone = LayerTransformer(str(tiny_backbone("bert")))
    assert backbone.model.config.hidden_dropout_prob > 0
    model = SentenceTransformer(modules=[backbone, MeanOfLayers(4, 32)], device="cpu").train()
    assert backbone.training
    assert not any(module.training for module in backbone.model.modules())
    assert not any(parameter.requires_grad for parameter in backbone.parameters())
    backbone.model.requires_grad_(True)  # whoever thaws it gets no graph all the same
    with torch.enable_grad():
        features = model(backbone.preprocess(TEXTS))
        again = model(backbone.preprocess(TEXTS))
    assert torch.equal(features["layer_embeddings"], again["layer_embeddings"])
    for name in ("layer_embeddings", "token_embeddings", "sentence_embedding"):
        assert features[name].grad_fn is None
        assert not features[name].requires_grad


@pytest.mark.parametrize("name", ["llama", "bert", "bloom", "mamba"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda backbone: pickle.loads(pickle.dumps(backbone))])
def test_copies_work(tiny_backbone: TinyBackbone, name: str, copied: Callable[[Any], Any]) -> None:
    """Worker processes get a pickle of a model that has run before."""
    backbone = LayerTransformer(str(tiny_backbone(name)), pooling="mean_without_first")
    expected = embed(backbone, TEXTS)
    twin = copied(backbone)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.zero_()  # what the copy does with blocks of the original would show
    assert torch.equal(embed(twin, TEXTS), expected)
    assert not any(parameter.requires_grad for parameter in twin.parameters())


def test_hooks_are_gone(tiny_backbone: TinyBackbone) -> None:
    backbone = LayerTransformer(str(tiny_backbone("llama")), pooling="mean")
    before = hooks_on(backbone)
    expected = embed(backbone, TEXTS)
    assert hooks_on(backbone) == before

    seen: list[Tensor] = []

    def fail_at_the_third(hidden: Tensor) -> Tensor:
        seen.append(hidden)
        assert hooks_on(backbone) > before
        if len(seen) == 3:
            raise KeyboardInterrupt
        return hidden

    with pytest.raises(KeyboardInterrupt):
        backbone.reduce_layers(backbone.preprocess(TEXTS), fail_at_the_third)
    assert hooks_on(backbone) == before

    with pytest.raises(IndexError):  # fails in the model, in front of the first block
        backbone({"input_ids": torch.tensor([[10**6]]), "attention_mask": torch.ones(1, 1)})
    assert hooks_on(backbone) == before
    assert torch.equal(embed(backbone, TEXTS), expected)


def test_float32_on_a_cpu_and_what_the_user_asks(tmp_path: Path, tiny_backbone: TinyBackbone) -> None:
    folder = tmp_path / "bfloat16"
    shutil.copytree(tiny_backbone("llama"), folder)
    AutoModel.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    usual = torch.bfloat16 if torch.accelerator.is_available() else torch.float32
    assert LayerTransformer(str(folder)).model.dtype == usual
    half = LayerTransformer(str(folder), pooling="mean", model_kwargs={"dtype": torch.bfloat16})
    assert half.model.dtype == torch.bfloat16
    got = embed(half, TEXTS)
    assert got.dtype == torch.float32
    assert torch.allclose(got, embed(LayerTransformer(str(folder), pooling="mean").float(), TEXTS), atol=0.1, rtol=0.1)


# Tokens


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_every_tokenizer_can_pad(tiny_backbone: TinyBackbone, tokenizer: str) -> None:
    backbone = LayerTransformer(str(tiny_backbone("llama", tokenizer)), pooling="mean")
    folder_tokenizer = AutoTokenizer.from_pretrained(tiny_backbone("llama", tokenizer))
    assert (folder_tokenizer.pad_token is None) == (tokenizer in ("plain", "bare"))
    assert backbone.tokenizer.pad_token is not None
    assert len(backbone.tokenizer) == len(folder_tokenizer)  # a new token would have no row in the embedding
    alone = torch.cat([embed(backbone, [text]) for text in TEXTS])
    assert torch.allclose(embed(backbone, TEXTS), alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("tokenizer", "front", "end"),
    [
        ("plain", ["<|endoftext|>"], []),
        ("bos", ["<s>"], []),
        ("eos", ["<|endoftext|>"], ["<|endoftext|>"]),
        ("cls", ["[CLS]"], ["[SEP]"]),
        ("chat", ["<|im_start|>"], []),
    ],
)
def test_mean_after_bos_puts_one_token_in_front(
    tiny_backbone: TinyBackbone, tokenizer: str, front: list[str], end: list[str]
) -> None:
    folder = tiny_backbone("llama", tokenizer)
    plain = AutoTokenizer.from_pretrained(folder)
    backbone = LayerTransformer(str(folder), pooling="mean_after_bos")
    text = SENTENCES[0]
    body = plain.tokenize(text)
    assert pieces(backbone, [text]) == [[*front, *body, *end]]
    expected = by_hand(folder, backbone.tokenizer.convert_tokens_to_ids([*front, *body, *end]), skip=1)
    assert torch.allclose(embed(backbone, [text, "a"])[0], expected, atol=1e-5, rtol=1e-5)
    # within the limit, and the truncated text keeps it
    backbone.max_seq_length = 6
    kept = body[: 6 - len(front) - len(end)]
    assert pieces(backbone, [text]) == [[*front, *kept, *end]]
    assert adds_first_token(backbone.tokenizer)


def test_mean_without_first_by_hand(tiny_backbone: TinyBackbone) -> None:
    folder = tiny_backbone("gpt2")
    backbone = LayerTransformer(str(folder), pooling="mean_without_first")
    ids = backbone.tokenizer(SENTENCES[0])["input_ids"]
    got = embed(backbone, [SENTENCES[0], "The", "x"])
    assert torch.allclose(got[0], by_hand(folder, ids, skip=1), atol=1e-5, rtol=1e-5)
    front = [backbone.tokenizer.bos_token_id or backbone.tokenizer.eos_token_id]  # before a text of one token
    alone = front + backbone.tokenizer("x")["input_ids"]
    assert torch.allclose(got[2], by_hand(folder, alone, skip=1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_chat_template_is_never_applied(tiny_backbone: TinyBackbone, pooling: str) -> None:
    backbone = LayerTransformer(str(tiny_backbone("qwen3")), pooling=pooling)
    assert backbone.tokenizer.chat_template
    front = ["<|im_start|>"] if pooling == "mean_after_bos" else []
    assert backbone.modalities == ["text"]
    for prompt in (None, "query:"):
        body = backbone.tokenizer.tokenize((prompt or "") + SENTENCES[0])
        assert pieces(backbone, [SENTENCES[0]], prompt=prompt) == [front + body]


@pytest.mark.parametrize("prompt", ["query:", "Instruct: find it\n", "query: "])
@pytest.mark.parametrize("tokenizer", ["plain", "bos", "cls", "chat"])
@pytest.mark.parametrize("pooling", ["mean", "mean_after_bos"])
def test_prompt(tiny_backbone: TinyBackbone, tokenizer: str, pooling: str, prompt: str) -> None:
    """``"query: "`` ends in a space, which a byte-level BPE joins to the first word of the text."""
    folder = tiny_backbone("llama", tokenizer)
    text = "the invoice for last month"
    for include_prompt in (True, False):
        backbone = LayerTransformer(str(folder), pooling=pooling, include_prompt=include_prompt)
        encoding = backbone.tokenizer(prompt + text, return_offsets_mapping=True)
        of_prompt = [end <= len(prompt.rstrip(" ")) for _, end in encoding["offset_mapping"]]
        leading = of_prompt.index(False)  # BOS and the prompt
        skip = (1 if pooling == "mean_after_bos" else 0) if include_prompt else leading
        expected = by_hand(folder, encoding["input_ids"], skip)
        for texts in ([text], [text, "a", SENTENCES[2]]):
            got = embed(backbone, texts, prompt=prompt)[0]
            assert torch.allclose(got, expected, atol=1e-5, rtol=1e-5), include_prompt


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize(
    ("name", "tokenizer"), [("llama", "plain"), ("gpt2", "chat"), ("bert", "cls"), ("llama", "bos")]
)
def test_empty_texts_are_finite(
    tiny_backbone: TinyBackbone, name: str, tokenizer: str, pooling: str, side: str
) -> None:
    folder = str(tiny_backbone(name, tokenizer))
    backbone = LayerTransformer(folder, pooling=pooling, processor_kwargs={"padding_side": side})
    full = embed(backbone, [SENTENCES[0]])
    for texts in ([""], ["", ""], [" ", "\n\t"], ["", SENTENCES[0], "   "]):
        got = embed(backbone, texts)
        assert got.shape == (len(texts), 4, 32)
        assert torch.isfinite(got).all()
        assert (got != 0).any(dim=2).all()
        if SENTENCES[0] in texts:  # an empty neighbour changes nothing
            assert torch.allclose(got[1], full[0], atol=1e-5, rtol=1e-5)
    assert torch.allclose(embed(backbone, ["", SENTENCES[0]])[0], embed(backbone, [""])[0], atol=1e-5, rtol=1e-5)
    assert torch.isfinite(embed(backbone, [""], prompt="query:")).all()
    assert backbone.preprocess([]) == {}


@pytest.mark.parametrize("tokenizer", ["plain", "bos", "cls", "chat", "bare"])
@pytest.mark.parametrize("text", HOSTILE.values(), ids=list(HOSTILE))
def test_hostile_texts(tiny_backbone: TinyBackbone, tokenizer: str, text: str) -> None:
    backbone = LayerTransformer(str(tiny_backbone("llama", tokenizer)), pooling="mean", on_truncate="ignore")
    got = embed(backbone, [text, SENTENCES[0]])
    assert torch.isfinite(got).all()
    assert torch.allclose(got[1], embed(backbone, [SENTENCES[0]])[0], atol=1e-5, rtol=1e-5)
    assert backbone.preprocess([text])["input_ids"].shape[1] <= 512
    template = {"cls": 2, "bos": 1}.get(tokenizer, 0)
    found = [token for token in pieces(backbone, [text])[0] if token in backbone.tokenizer.all_special_tokens]
    assert len(found) == template


def test_half_a_surrogate_pair_counts_as_the_replacement_character(tiny_backbone: TinyBackbone) -> None:
    backbone = LayerTransformer(str(tiny_backbone("llama")), pooling="mean")
    assert torch.equal(embed(backbone, ["cut \ud83d here"]), embed(backbone, ["cut \ufffd here"]))
    assert torch.equal(embed(backbone, ["\ud83d\ude00"]), embed(backbone, ["😀"]))


def test_special_tokens_in_a_text_if_asked_for(tiny_backbone: TinyBackbone) -> None:
    folder = str(tiny_backbone("qwen3"))
    asked = LayerTransformer(folder, pooling="mean", processor_kwargs={"split_special_tokens": False})
    assert pieces(asked, ["<|im_end|>a"]) == [["<|im_end|>", "a"]]
    assert "<|im_end|>" not in pieces(LayerTransformer(folder, pooling="mean"), ["<|im_end|>a"])[0]


# Length


@pytest.mark.parametrize(("tokenizer", "pooling"), [("plain", "mean"), ("chat", "mean_after_bos"), ("cls", "mean")])
def test_truncation_is_counted_and_warned_once(
    tiny_backbone: TinyBackbone, tokenizer: str, pooling: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(tiny_backbone("llama", tokenizer))
    backbone = LayerTransformer(folder, pooling=pooling, max_seq_length=9)
    special = len(pieces(backbone, ["x"])[0]) - 1
    fits, too_long = "x" * (9 - special), "x" * (10 - special)  # one token for each x
    with caplog.at_level(logging.WARNING, logger="ilse_embed"):
        backbone.preprocess([fits, "x", ""])
        assert (backbone.truncated_texts, caplog.records) == (0, [])
        features = backbone.preprocess([fits, too_long, "x" * 50])
        assert features["input_ids"].shape == (3, 9)
        assert (backbone.truncated_texts, backbone.longest_truncated) == (2, 50 + special)
        backbone.preprocess([too_long])
        assert backbone.truncated_texts == 3
        backbone.preprocess(["x"], prompt="x" * 9)
        assert backbone.truncated_texts >= 4  # the text; the prompt alone may count as well
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert all(words in warnings[0] for words in ("2 of 3", "max_seq_length=9", str(50 + special)))


def test_truncation_as_an_error(tiny_backbone: TinyBackbone, caplog: pytest.LogCaptureFixture) -> None:
    backbone = LayerTransformer(str(tiny_backbone("llama")), max_seq_length=9, on_truncate="error")
    backbone.preprocess(["x" * 9])
    with pytest.raises(ValueError, match=r"1 of 2 texts .* max_seq_length=9 .* 10"):
        backbone.preprocess(["x", "x" * 10])
    backbone.on_truncate = "ignore"
    backbone.preprocess(["x" * 10])
    assert backbone.truncated_texts == 0


@pytest.mark.parametrize("on_truncate", ["warn", "error"])
def test_texts_that_measure_the_sink_are_not_counted(
    tiny_backbone: TinyBackbone, on_truncate: str, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in (tiny_backbone("llama"), tiny_backbone("llama", max_position_embeddings=16)):
        backbone = LayerTransformer(str(folder), max_seq_length=2, on_truncate=on_truncate)
        assert (backbone.truncated_texts, backbone.pooling, caplog.records) == (0, "mean", [])


@pytest.mark.parametrize(
    ("config", "given", "expected"),
    [
        ({}, None, 512),
        ({}, 100, 100),
        ({"max_position_embeddings": 64}, None, 64),
        ({"max_position_embeddings": 64}, 9, 9),
    ],
)
def test_max_seq_length(tiny_backbone: TinyBackbone, config: dict, given: int | None, expected: int) -> None:
    backbone = LayerTransformer(str(tiny_backbone("llama", **config)), pooling="mean", max_seq_length=given)
    assert backbone.max_seq_length == expected
    assert backbone.preprocess(["x" * 600])["input_ids"].shape == (1, expected)


def test_max_seq_length_is_capped(tmp_path: Path, tiny_backbone: TinyBackbone) -> None:
    shutil.copytree(tiny_backbone("llama", max_position_embeddings=100_000), tmp_path / "long")
    config = tmp_path / "long" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_max_length": 10**30}))
    assert LayerTransformer(str(tmp_path / "long")).max_seq_length == 2048
    assert LayerTransformer(str(tmp_path / "long"), max_seq_length=5000).max_seq_length == 5000


# Attention sinks


def with_sink(folder: Path, to: Path, sinks: list[float]) -> Path:
    """GPT-2 whose embeddings of the first positions drown everything else."""
    shutil.copytree(folder, to)
    model = AutoModel.from_pretrained(folder)
    with torch.no_grad():
        for position, size in enumerate(sinks):
            model.wpe.weight[position] = size
    model.save_pretrained(to)
    return to


@pytest.mark.parametrize(
    ("tokenizer", "sinks", "pooling"),
    [
        ("chat", [], "mean"),
        ("chat", [1000], "mean_without_first"),
        ("bos", [1000], "mean_without_first"),  # the first token is the BOS
        ("bare", [1000], "mean_without_first"),
    ],
)
def test_sink_aware_choice(
    tiny_backbone: TinyBackbone, tmp_path: Path, tokenizer: str, sinks: list[float], pooling: str
) -> None:
    folder = with_sink(tiny_backbone("gpt2", tokenizer), tmp_path / "sink", sinks)
    backbone = LayerTransformer(str(folder), pooling="sink_aware")
    assert backbone.pooling == pooling
    usual = AutoTokenizer.from_pretrained(folder)("ferry")["input_ids"]
    if len(usual) > 1:  # a text of one token gets another in front
        assert pieces(backbone, ["ferry"])[0] == backbone.tokenizer.convert_ids_to_tokens(usual)
    if pooling == "mean_without_first":
        assert first_token_share(backbone).max() > 0.9
        assert first_token_share(backbone, skip=1).max() < SINK_SHARE


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("texts", [["e", "e e e e e"], ["e", "e"], ["", "e", "e e e"], [""]])
def test_a_text_of_one_token_is_not_pooled_over_the_sink(
    tiny_backbone: TinyBackbone, tmp_path: Path, side: str, texts: list[str]
) -> None:
    folder = with_sink(tiny_backbone("gpt2", "chat"), tmp_path / "sink", [1000])
    backbone = LayerTransformer(str(folder), pooling="sink_aware", processor_kwargs={"padding_side": side})
    assert backbone.pooling == "mean_without_first"
    features = backbone.preprocess(texts)
    assert features["attention_mask"].sum(1).min() >= 2
    layers = backbone(features)["layer_embeddings"]
    assert torch.isfinite(layers).all()
    assert layers[:, 0].norm(dim=-1).max() < 100  # the sink is 1000


def test_share_of_the_first_token_by_hand(tiny_backbone: TinyBackbone, tmp_path: Path) -> None:
    backbone = LayerTransformer(str(tiny_backbone("llama")), pooling="mean")
    shares = []
    for text in PROBE_TEXTS:
        norms = backbone.model.get_input_embeddings()(backbone.preprocess([text])["input_ids"])[0].norm(dim=1)
        shares.append((norms[1] / norms[1:].sum()).item())
    assert first_token_share(backbone, skip=1)[0].item() == pytest.approx(sum(shares) / len(shares), abs=1e-6)


def test_bert_keeps_the_plain_mean(tiny_backbone: TinyBackbone) -> None:
    assert LayerTransformer(str(tiny_backbone("bert")), pooling="sink_aware").pooling == "mean"


def test_smollm2(smollm2: Path) -> None:
    before = first_token_share(LayerTransformer(str(smollm2), pooling="mean"))
    backbone = LayerTransformer(str(smollm2), pooling="sink_aware")
    assert backbone.pooling == "mean_without_first"
    assert before.shape == (backbone.num_layers,) == (31,)
    assert before.max() > 0.9
    assert first_token_share(backbone, skip=1).max() < 0.25
    assert "<|im_end|>" not in pieces(backbone, ["<|im_end|>"])[0]


# Save and load


@pytest.mark.parametrize(("name", "pooling"), [("llama", "mean_after_bos"), ("bert", "mean"), ("bloom", "sink_aware")])
@pytest.mark.parametrize("save_backbone", [False, True])
def test_save_and_load(
    tiny_backbone: TinyBackbone, tmp_path: Path, name: str, pooling: str, save_backbone: bool
) -> None:
    folder = tmp_path / "backbone"
    shutil.copytree(tiny_backbone(name, "chat" if name == "llama" else None), folder)
    backbone = LayerTransformer(
        str(folder), pooling=pooling, include_prompt=False, max_seq_length=11, save_backbone=save_backbone
    )
    expected = embed(backbone, TEXTS)
    save(backbone, tmp_path / "artifact")
    assert bool(list((tmp_path / "artifact").glob("*.safetensors"))) == save_backbone
    if save_backbone:
        shutil.rmtree(folder)
    loaded = LayerTransformer.load(str(tmp_path / "artifact"))
    assert loaded.max_seq_length == 11
    assert loaded.pooling == backbone.pooling != "sink_aware"
    assert loaded.include_prompt is False
    assert loaded.get_config_dict() == backbone.get_config_dict()
    assert pieces(loaded, TEXTS) == pieces(backbone, TEXTS)  # BOS not twice
    assert torch.equal(embed(loaded, TEXTS), expected)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"num_hidden_layers": 2}, ["layers 3", "needs 4"]),
        ({"hidden_size": 16}, ["width 16", "needs 32"]),
        ({"num_hidden_layers": 5, "hidden_size": 48}, ["layers 6", "needs 4", "width 48", "needs 32"]),
        ({"tokenizer": "bos"}, ["tokenizer"]),
        ({"tokenizer": "bare"}, ["tokenizer"]),
    ],
)
def test_another_backbone_is_refused(
    tiny_backbone: TinyBackbone, tmp_path: Path, other: dict[str, Any], words: list[str]
) -> None:
    backbone = LayerTransformer(str(tiny_backbone("llama")), pooling="mean")
    backbone.save(str(tmp_path))
    place = str(tiny_backbone("llama", **other))
    with pytest.raises(ValueError) as raised:
        LayerTransformer.load(str(tmp_path), model_kwargs={"backbone": place})
    assert all(word in str(raised.value) for word in [*words, place]), raised.value
    if "tokenizer" in other:  # both hashes
        assert backbone.backbone_facts["tokenizer"] in str(raised.value)


def test_other_weights_are_warned_about(
    tiny_backbone: TinyBackbone, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    LayerTransformer(str(tiny_backbone("llama")), pooling="mean").save(str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="ilse_embed"):
        LayerTransformer.load(str(tmp_path), model_kwargs={"dtype": torch.bfloat16})
        assert not caplog.records  # the same weights, rounded
        LayerTransformer.load(str(tmp_path), model_kwargs={"backbone": str(tiny_backbone("llama", seed=1))})
    assert [record.getMessage() for record in caplog.records if "other weights" in record.getMessage()]


def test_a_backbone_that_moved(tiny_backbone: TinyBackbone, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(tiny_backbone("llama"), old)
    backbone = LayerTransformer(str(old), pooling="mean")
    save(backbone, tmp_path / "artifact")
    old.rename(new)
    with pytest.raises(FileNotFoundError) as raised:
        LayerTransformer.load(str(tmp_path / "artifact"))
    assert all(word in str(raised.value) for word in (str(old), "backbone="))
    loaded = LayerTransformer.load(str(tmp_path / "artifact"), model_kwargs={"backbone": str(new)})
    assert torch.equal(embed(loaded, TEXTS), embed(backbone, TEXTS))


def test_a_relative_path_is_found_from_elsewhere(
    tiny_backbone: TinyBackbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_backbone("llama"), tmp_path / "models" / "tiny")
    monkeypatch.chdir(tmp_path)
    save(LayerTransformer("models/tiny", pooling="mean"), tmp_path / "artifact")
    monkeypatch.chdir("/")
    assert LayerTransformer.load(str(tmp_path / "artifact")).num_layers == 4


def test_a_bundle_moves_as_a_whole(tiny_backbone: TinyBackbone, tmp_path: Path) -> None:
    """A reference relative to the artifact."""
    shutil.copytree(tiny_backbone("llama"), tmp_path / "here" / "backbone")
    backbone = LayerTransformer(str(tmp_path / "here" / "backbone"), pooling="mean", backbone="backbone")
    expected = embed(backbone, TEXTS)
    backbone.save(str(tmp_path / "here"))
    (tmp_path / "here").rename(tmp_path / "there")
    loaded = LayerTransformer.load(str(tmp_path / "there"))
    assert loaded.backbone == "backbone"
    assert torch.equal(embed(loaded, TEXTS), expected)


def test_a_name_is_pinned_to_its_commit(tiny_backbone: TinyBackbone, tmp_path: Path) -> None:
    """A hub cache in which main moves on after the artifact was made."""
    first, second = "a" * 40, "b" * 40
    repo = tmp_path / "models--acme--tiny"
    shutil.copytree(tiny_backbone("llama"), repo / "snapshots" / first)
    shutil.copytree(tiny_backbone("llama", seed=1), repo / "snapshots" / second)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(first)
    where = {"cache_dir": str(tmp_path)}
    everywhere: dict[str, Any] = {"model_kwargs": where, "processor_kwargs": where, "config_kwargs": where}
    backbone = LayerTransformer("acme/tiny", pooling="mean", **everywhere)
    assert (backbone.backbone, backbone.backbone_revision) == ("acme/tiny", first)
    save(backbone, tmp_path / "artifact")

    (repo / "refs" / "main").write_text(second)
    now = LayerTransformer("acme/tiny", pooling="mean", **everywhere)
    assert not torch.allclose(embed(now, TEXTS), embed(backbone, TEXTS), atol=1e-3)
    loaded = LayerTransformer.load(str(tmp_path / "artifact"), cache_folder=str(tmp_path), revision="artifact-tag")
    assert torch.equal(embed(loaded, TEXTS), embed(backbone, TEXTS))
    assert loaded.backbone_revision == first


def test_code_of_the_backbone_never_runs(
    tiny_backbone: TinyBackbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user trusts the artifact; the backbone it refers to may be anyone's."""
    for kind in (LlamaConfig, LlamaModel):  # transformers marks the classes themselves; the mark ends with this test
        monkeypatch.setattr(kind, "_auto_class", None)
    folder, marker = tmp_path / "backbone", tmp_path / "ran"
    shutil.copytree(tiny_backbone("llama"), folder)
    (folder / "theirs.py").write_text(
        f"open({str(marker)!r}, 'w')\nfrom transformers import LlamaConfig as Config, LlamaModel as Model\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "theirs.Config", "AutoModel": "theirs.Model"}
    (folder / "config.json").write_text(json.dumps(config))

    model = SentenceTransformer(modules=[LayerTransformer(str(folder)), MeanOfLayers(4, 32)], device="cpu")
    model.save(str(tmp_path / "artifact"), create_model_card=False)
    loaded = SentenceTransformer(str(tmp_path / "artifact"), trust_remote_code=True, device="cpu")
    assert isinstance(loaded[0], LayerTransformer)
    assert not marker.exists()
    AutoModel.from_pretrained(folder, trust_remote_code=True)  # so much for this test being able to fail
    assert marker.exists()


# Options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pooling": "cls"}, ["'cls'", *POOLINGS, "sink_aware"]),
        ({"on_truncate": "split"}, ["'split'", "warn", "error", "ignore"]),
        ({"backend": "onnx"}, ["'onnx'", "torch"]),
        ({"max_seq_length": 0}, ["max_seq_length is 0"]),
    ],
)
def test_wrong_options(tiny_backbone: TinyBackbone, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as raised:
        LayerTransformer(str(tiny_backbone("llama")), **options)
    assert all(word in str(raised.value) for word in words), raised.value


def test_another_backend_is_refused_at_load(tiny_backbone: TinyBackbone, tmp_path: Path) -> None:
    LayerTransformer(str(tiny_backbone("llama")), pooling="mean").save(str(tmp_path))
    with pytest.raises(ValueError, match="'onnx'"):
        LayerTransformer.load(str(tmp_path), backend="onnx")


def test_no_token_to_put_in_front(tiny_backbone: TinyBackbone) -> None:
    with pytest.raises(ValueError, match="mean_without_first"):
        LayerTransformer(str(tiny_backbone("llama", "bare")), pooling="mean_after_bos")


def test_missing_folder() -> None:
    with pytest.raises(OSError):
        LayerTransformer("/no/such/folder")


def test_public_name(tiny_backbone: TinyBackbone) -> None:
    assert LayerTransformer.__module__ == "ilse_embed"
    folder = str(tiny_backbone("llama"))
    assert repr(LayerTransformer(folder)) == f"LayerTransformer({folder!r}, num_layers=4, pooling='mean')"
