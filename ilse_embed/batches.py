"""Texts -> batches of like length under a budget of tokens -> a frozen model, smaller ones where memory ends.

Letters: ``B`` texts of a batch, ``T`` tokens of its longest.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils.memory import should_reduce_batch_size
from sentence_transformers.util import batch_to_device
from torch import Tensor

from ilse_embed.tokens import valid_unicode

if TYPE_CHECKING:
    from ilse_embed.backbone import LayerTransformer

logger = logging.getLogger(__name__)

BATCH_TOKENS = {"cpu": 1024, "gpu": 16384}
"""Padded tokens in a batch. On a CPU larger ones leave its caches: 2048 were 10 to 25 % slower."""


class BatchRunner:
    """Runs a model over texts in batches; one that does not fit into memory is halved, and so is the budget.

    Attributes:
        batch_tokens: Padded tokens in a batch; becomes smaller when memory ends.
        tokens: Tokens run so far, padding left out.
    """

    def __init__(
        self,
        backbone: LayerTransformer,
        run: Callable[[dict[str, Any]], Tensor],
        *,
        batch_tokens: int | None = None,
        prompt: str | None = None,
    ) -> None:
        """Keep the model.

        Args:
            backbone: Tokenizes, and says on which device the model is.
            run: Token features of B texts -> a tensor whose first dimension is B.
            batch_tokens: Padded tokens in a batch, at least 1; by default as `BATCH_TOKENS` has it for the device.
            prompt: Goes in front of each text.

        Raises:
            ValueError: If ``batch_tokens`` is below 1.
        """
        if batch_tokens is not None and batch_tokens < 1:
            raise ValueError(f"batch_tokens is {batch_tokens}; it must be at least 1")
        self.backbone, self.run, self.prompt = backbone, run, prompt
        self.batch_tokens = batch_tokens or BATCH_TOKENS["cpu" if backbone.model.device.type == "cpu" else "gpu"]
        self.tokens = 0

    def __call__(self, texts: Sequence[str]) -> Iterator[tuple[list[int], Tensor]]:
        """Run.

        Yields:
            The positions of some texts, and what the model gives for them, on the CPU. The next batch is under way by
            then, so that a GPU does not wait for whoever takes the results.

        Raises:
            MemoryError: If a single text does not fit.
        """
        lengths = token_lengths(self.backbone, texts, self.prompt)
        batches = deque(batches_of(lengths, self.batch_tokens))
        ready: tuple[list[int], Tensor] | None = None
        while batches:
            rows = batches.popleft()
            result = self._try([texts[row] for row in rows])
            if result is None and len(rows) == 1:
                raise MemoryError(
                    f"a text of {lengths[rows[0]]} tokens does not fit into memory ({self.backbone.model.device}): "
                    f"{texts[rows[0]][:80]!r}; set a smaller max_seq_length, or load the backbone in bfloat16"
                )
            if result is None:
                size = max(1, len(rows) // 2) * lengths[rows[0]]
                logger.warning("out of memory with %d tokens in a batch; going on with %d", self.batch_tokens, size)
                self.batch_tokens = size
                left = [row for batch in (rows, *batches) for row in batch]
                batches = deque([left[row] for row in b] for b in batches_of([lengths[r] for r in left], size))
                continue
            if ready is not None:
                yield ready[0], ready[1].cpu()
            ready = rows, result
            self.tokens += sum(lengths[row] for row in rows)
        if ready is not None:
            yield ready[0], ready[1].cpu()

    def _try(self, texts: list[str]) -> Tensor | None:
        """What the model gives; None where memory ends."""
        device = self.backbone.model.device
        try:
            with torch.inference_mode():
                return self.run(batch_to_device(self.backbone.preprocess(texts, prompt=self.prompt), device))
        except (RuntimeError, MemoryError) as error:
            if not (isinstance(error, MemoryError) or should_reduce_batch_size(error)):
                raise
        gc.collect()  # the failed pass is freed only now that its error is gone
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return None


def token_lengths(backbone: LayerTransformer, texts: Sequence[str], prompt: str | None = None) -> list[int]:
    """Tokens of each text as the backbone sees it, prompt and special tokens included, at least 1."""
    if not texts:
        return []
    ids = backbone.tokenizer(
        [(prompt or "") + valid_unicode(text) for text in texts], truncation=True, max_length=backbone.max_seq_length
    )["input_ids"]
    return [max(1, len(tokens)) for tokens in ids]


def batches_of(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Positions of the texts in batches of at most ``batch_tokens`` padded tokens (or one text), longest first."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches
