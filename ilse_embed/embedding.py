"""Texts -> embeddings in batches under a budget of tokens.

Letters: ``n`` texts, ``m`` embedding width.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from ilse_embed.batches import BatchRunner


class TextEmbedder:
    """Texts -> embeddings, in batches of like length under a budget of tokens; made once and called again and again."""

    def __init__(
        self,
        model: SentenceTransformer,
        *,
        batch_tokens: int | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
    ) -> None:
        """Keep the model.

        Args:
            model: A model whose first module is a `LayerTransformer`.
            batch_tokens: Padded tokens in a batch; see `BatchRunner`.
            prompt: What goes in front of each text.
            prompt_name: A prompt of the model by its name; by default the model's default prompt.

        Raises:
            ValueError: If the model has no prompt of this name.
        """
        name = prompt_name or model.default_prompt_name
        if prompt is None and name is not None:
            if name not in model.prompts:
                raise ValueError(f"prompt_name is {name!r}; this model has {json.dumps(sorted(model.prompts))}")
            prompt = model.prompts[name]
        self.model = model.eval()
        backbone: Any = model[0]
        self.runner = BatchRunner(
            backbone,
            lambda features: model(features)["sentence_embedding"].float(),
            batch_tokens=batch_tokens,
            prompt=prompt or None,
        )

    def __call__(self, texts: Sequence[str], tell: Callable[[int], None] | None = None) -> NDArray[np.float32]:
        """Embed; equal texts once.

        Args:
            texts: n texts.
            tell: Called after each batch with the number of texts done, equal ones counted once.

        Returns:
            (n, m)

        Raises:
            FloatingPointError: If an embedding is not finite, with the text.
            MemoryError: If a single text does not fit.
        """
        distinct = list(dict.fromkeys(texts))
        done = 0
        embeddings = np.empty((len(distinct), self.model.get_embedding_dimension() or 0), np.float32)
        for rows, batch in self.runner(distinct):
            embeddings[rows] = batch[:, : embeddings.shape[1]].numpy()  # truncate_dim
            finite = torch.isfinite(batch).all(-1)
            if not finite.all():
                wrong = rows[int((~finite).nonzero()[0])]
                raise FloatingPointError(
                    f"the embedding of the text {distinct[wrong][:80]!r} is not finite; load the backbone in bfloat16 "
                    "or float32, not float16"
                )
            done += len(rows)
            if tell is not None:
                tell(done)
        place = {text: row for row, text in enumerate(distinct)}
        return embeddings[[place[text] for text in texts]] if len(distinct) < len(texts) else embeddings
