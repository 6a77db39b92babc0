"""What a backbone needs of its tokenizer: padding, a BOS token in front, texts without tokens, an identity."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers.processors import Sequence as ProcessorSequence
from tokenizers.processors import TemplateProcessing
from torch import nn


def set_pad_token(tokenizer: Any) -> None:
    """Take another special token for padding where the tokenizer has none; the attention mask hides it."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.bos_token or tokenizer.unk_token
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)


def fill_short(tokenizer: Any, features: dict[str, Any], least: int) -> None:
    """Put BOS (or EOS, or padding) tokens in front of texts of fewer than ``least`` tokens.

    A text without tokens has no vector; a text of one token is nothing but a sink where the first token is one.

    Shapes:
        features["input_ids"], features["attention_mask"]: (B, T) -> (B, max(T, least))
    """
    left = tokenizer.padding_side == "left"
    missing = max(0, least - features["input_ids"].shape[1])
    for key in ("input_ids", "attention_mask", "token_type_ids"):
        if missing and key in features:
            features[key] = nn.functional.pad(features[key].long(), (missing, 0) if left else (0, missing))
    ids, mask = features["input_ids"], features["attention_mask"]
    filler = filler_token(tokenizer)
    for row in (mask.sum(1) < least).nonzero().flatten().tolist():
        tokens = ids[row][mask[row].bool()]
        place = slice(-least, None) if left else slice(least)
        ids[row, place] = torch.cat([tokens.new_full((least - len(tokens),), filler), tokens])
        mask[row, place] = 1


@dataclass
class FillShort:
    """Does the same before texts are flattened into one row; a flattening collator drops texts without tokens.

    Attributes:
        collate: Lists of tokens -> a flattened batch.
        tokenizer: Has the token that is put in front.
        least: Gives the fewest tokens of a text.
    """

    collate: Callable[[list[dict[str, Any]]], dict[str, Any]]
    tokenizer: Any
    least: Callable[[], int]

    def __call__(self, texts: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate."""
        filler, least = filler_token(self.tokenizer), self.least()
        filled = [[filler] * (least - len(text["input_ids"])) + list(text["input_ids"]) for text in texts]
        return self.collate([{"input_ids": tokens} for tokens in filled])


def filler_token(tokenizer: Any) -> int:
    """A token that says nothing: BOS, or else EOS, or else padding."""
    tokens = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    return int(next(token for token in tokens if token is not None))


def adds_first_token(tokenizer: Any) -> bool:
    """Whether the tokenizer itself puts a special token in front of every text."""
    with_special, without = (tokenizer("a", add_special_tokens=flag)["input_ids"] for flag in (True, False))
    return len(with_special) > len(without) and with_special[0] != without[0]


def put_bos_in_front(tokenizer: Any) -> None:
    """Make the tokenizer put its BOS token (or else EOS) in front of every text.

    Raises:
        ValueError: If it has neither, or is not backed by the tokenizers library.
    """
    token = tokenizer.bos_token or tokenizer.eos_token
    if token is None or not tokenizer.is_fast:
        raise ValueError(
            'pooling="mean_after_bos" needs a tokenizer of the tokenizers library with a BOS or EOS token; '
            f'{type(tokenizer).__name__} is not one. Take pooling="mean_without_first" instead.'
        )
    template = TemplateProcessing(
        single=f"{token}:0 $A:0",
        pair=f"{token}:0 $A:0 $B:1",
        special_tokens=[(token, tokenizer.convert_tokens_to_ids(token))],
    )
    existing = tokenizer.backend_tokenizer.post_processor
    parts = [template] if existing is None else [existing, template]
    tokenizer.backend_tokenizer.post_processor = ProcessorSequence(parts)


def valid_unicode(text: str) -> str:
    """The text with U+FFFD for each lone surrogate, which tokenizers refuse."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def tokenizer_digest(tokenizer: Any) -> str:
    """Hash of the vocabulary and of how a text of digits, scripts and white space is cut."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    probe = "It's 1,234.50 \u20ac, na\u00efve \u6f22\u5b57 \u0627\u0644\u0639\u0631\u0628\u064a\u0629\n\n  x \U0001f600"
    ids = json.dumps(tokenizer(probe, add_special_tokens=False, verbose=False)["input_ids"]).encode()
    return hashlib.sha256(vocabulary + ids).hexdigest()[:16]
