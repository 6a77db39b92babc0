"""Tokens -> one vector per layer, by attention mask.

Works on padded batches ``(B, T, d)``, whatever the padding side, and on flattened batches ``(1, total, d)`` as
FlashAttention takes them. Letters: ``B`` texts, ``T`` tokens, ``L`` layers, ``d`` backbone width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sentence_transformers.base.modules import Module
from torch import Tensor


class TokenPooler:
    """Mean over the tokens of each text, leaving out the first ``skip`` of them; made once for a batch.

    The last token of a text always counts; a text without tokens gives zeros.
    """

    def __init__(self, features: Mapping[str, Any], skip: int = 0) -> None:
        """Read the layout of the batch.

        Args:
            features: ``attention_mask`` (B, T), or for a flattened batch ``cu_seq_lens_q`` (B + 1).
            skip: How many leading tokens of each text to leave out.

        Raises:
            KeyError: If neither key is there.
        """
        if "attention_mask" in features:
            mask = features["attention_mask"].bool()  # (B, T)
            skipped = (mask.sum(1, keepdim=True) - 1).clamp(min=0, max=skip)
            weights = (mask & (mask.cumsum(1) > skipped)).float()
            self._weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
            self._segments: Tensor | None = None
        elif "cu_seq_lens_q" in features:
            bounds = features["cu_seq_lens_q"].long()
            lengths = bounds.diff()
            self._segments = torch.repeat_interleave(torch.arange(len(lengths), device=bounds.device), lengths)
            position = torch.arange(int(bounds[-1]), device=bounds.device) - bounds[:-1][self._segments]
            skipped = (lengths - 1).clamp(min=0, max=skip)
            kept = (position >= skipped[self._segments]).float()
            self._weights = kept / (lengths - skipped)[self._segments]
            self._size = len(lengths)
        else:
            raise KeyError(f"pooling needs 'attention_mask' or 'cu_seq_lens_q'; the batch has {sorted(features)}")

    def __call__(self, hidden: Tensor) -> Tensor:
        """Pool one layer, accumulating in float32.

        Shapes:
            hidden: (B, T, d) or flattened (1, total, d), any floating dtype -> (B, d) float32
        """
        weights = self._weights.to(hidden.device)  # a device map may put blocks on several devices
        if self._segments is None:
            return torch.bmm(weights[:, None, :], hidden.float())[:, 0]
        pooled = hidden.new_zeros(self._size, hidden.shape[-1], dtype=torch.float32)
        return pooled.index_add_(0, self._segments.to(hidden.device), hidden[0].float() * weights[:, None])


def skipped_tokens(features: Mapping[str, Any], *, skip_first: bool, include_prompt: bool) -> int:
    """How many leading tokens the pooling leaves out: the first one, the prompt, or none."""
    prompt_length = features.get("prompt_length", 0)
    if isinstance(prompt_length, Tensor):  # the trainer's collator hands over one number for each text
        prompt_length = int(prompt_length.flatten()[0])
    return max(int(skip_first), 0 if include_prompt else prompt_length)


class LayerPooling(Module):
    """Mean of the tokens for every layer, for a stock Transformer that returns all hidden states.

    Behind ``Transformer(name, config_kwargs={"output_hidden_states": True})`` it gives the same as a
    `LayerTransformer`, at L times the memory.

    Shapes:
        features["all_layer_embeddings"]: L x (B, T, d) -> features["layer_embeddings"]: (B, L, d) float32
    """

    __module__ = "ilse_embed"
    config_keys = ["skip_first", "include_prompt"]  # noqa: RUF012 (a list by the contract of the base class)

    def __init__(self, skip_first: bool = False, include_prompt: bool = True) -> None:
        """Choose which tokens enter the mean.

        Args:
            skip_first: Leave out the first token of each text (an attention sink in decoder models).
            include_prompt: Whether the tokens of a prompt count.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.skip_first = skip_first
        self.include_prompt = include_prompt

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Add ``layer_embeddings``.

        Raises:
            ValueError: If the backbone did not return its hidden states.
        """
        if "all_layer_embeddings" not in features:
            raise ValueError(
                "LayerPooling needs all hidden states; build the Transformer with "
                'config_kwargs={"output_hidden_states": True}, or use ilse_embed.LayerTransformer instead of both'
            )
        skip = skipped_tokens(features, skip_first=self.skip_first, include_prompt=self.include_prompt)
        pool = TokenPooler(features, skip)
        features["layer_embeddings"] = torch.stack([pool(h) for h in features["all_layer_embeddings"]], dim=1)
        return features

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write the configuration; there are no weights."""
        self.save_config(output_path)
