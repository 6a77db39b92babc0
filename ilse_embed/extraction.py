"""Texts -> layer features, once: the language model runs here and never again in training or search.

Letters: ``n`` texts, ``L`` layers, ``d`` backbone width.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch
from sentence_transformers.util import get_device_name
from torch import Tensor

from ilse_embed.batches import BatchRunner, token_lengths
from ilse_embed.features import LayerTable
from ilse_embed.store import FeatureStore, dtype_of, store_digest, store_facts

if TYPE_CHECKING:
    from ilse_embed.backbone import LayerTransformer

SHARD_TEXTS = 1024
"""Texts in a shard; what a crash can cost at most."""

SAMPLE_SHARDS = 2
"""Shards on which a compression is fitted: the first ones."""

LEAST_SAMPLE = 256
"""Texts that a compression needs to be fitted on."""

Progress = Callable[[int, int, int], None]
"""Called with (texts done, texts in all, tokens done) after each batch."""


@dataclass(frozen=True)
class BackboneSource:
    """How to load a backbone, for every process that has to.

    Attributes:
        name: Name on the hub or folder.
        pooling: See `LayerTransformer`.
        max_seq_length: See `LayerTransformer`.
        dtype: Of the weights, one of `ilse_embed.store.DTYPES`; None is float32 without a GPU, else the checkpoint's.
    """

    name: str
    pooling: str = "mean"
    max_seq_length: int | None = None
    dtype: str | None = None

    def load(self, device: str | None = None) -> LayerTransformer:
        """Load it.

        Args:
            device: Where to; by default `default_device`.

        Raises:
            ValueError: If an option is not among the allowed ones.
        """
        from ilse_embed.backbone import LayerTransformer

        model_kwargs = {} if self.dtype is None else {"dtype": dtype_of(self.dtype)}
        backbone = LayerTransformer(
            self.name, pooling=self.pooling, max_seq_length=self.max_seq_length, model_kwargs=model_kwargs
        )
        return backbone.to(device or default_device())


def default_device() -> str:
    """A GPU if there is one; where a launcher starts a process for each (LOCAL_RANK), that of this process."""
    number, gpus = os.environ.get("LOCAL_RANK"), torch.cuda.device_count()
    return f"cuda:{int(number) % gpus}" if number and gpus else str(get_device_name())


class LayerExtractor:
    """Texts -> layer features, in the order of the texts; made once for a backbone and called for each shard.

    Attributes:
        runner: Its batches, and the tokens run so far.
    """

    def __init__(
        self, backbone: LayerTransformer, *, batch_tokens: int | None = None, prompt: str | None = None
    ) -> None:
        """Keep the backbone; see `BatchRunner` for the options."""
        self.backbone = backbone
        self.runner = BatchRunner(
            backbone, lambda features: backbone(features)["layer_embeddings"], batch_tokens=batch_tokens, prompt=prompt
        )

    def __call__(
        self, texts: Sequence[str], store: FeatureStore | None = None, tell: Callable[[int], None] | None = None
    ) -> Tensor:
        """Run the backbone.

        Args:
            texts: n texts.
            store: Packs the features as it keeps them.
            tell: Called after each batch with the number of texts in it.

        Shapes:
            n texts -> (n, L, d) float32, or as the store has them

        Raises:
            FloatingPointError: If a layer is not finite, with the names of model, layer and text.
        """
        shape = (self.backbone.num_layers, self.backbone.get_embedding_dimension())
        shape, dtype = (shape, torch.float32) if store is None else (store.shape, store.dtype)
        gathered = torch.empty(len(texts), *shape, dtype=dtype)
        for rows, layers in self.runner(texts):
            some = [texts[row] for row in rows]
            self._check(layers, some, "the backbone in bfloat16 or float32, not float16")
            gathered[rows] = layers if store is None else self.pack(layers, some, store)
            if tell is not None:
                tell(len(rows))
        return gathered

    def pack(self, layers: Tensor, texts: Sequence[str], store: FeatureStore) -> Tensor:
        """Features of some texts as a store has them.

        Shapes:
            layers: (n, L, d) -> as `FeatureStore.pack`

        Raises:
            FloatingPointError: If the store's dtype cannot hold a layer.
        """
        packed = store.pack(layers)
        self._check(packed, texts, "with a store in bfloat16 or float32, not float16")
        return packed

    def _check(self, layers: Tensor, texts: Sequence[str], instead: str) -> None:
        finite = torch.isfinite(layers).all(-1)
        if not finite.all():
            row, layer = (int(index) for index in (~finite).nonzero()[0])
            raise FloatingPointError(
                f"layer {layer} of {self.backbone.backbone!r} is not finite for the text {texts[row][:80]!r}; extract "
                f"{instead}"
            )


@dataclass(frozen=True)
class Plan:
    """What an extraction has to do.

    Attributes:
        texts: Distinct texts.
        missing: Those that the store lacks, in order.
        tokens: Tokens of the missing ones.
        bytes: What they will take on disk.
        free: What the disk has left.
    """

    texts: int
    missing: list[str]
    tokens: int
    bytes: int
    free: int

    @classmethod
    def of(cls, backbone: LayerTransformer, texts: Iterable[str], store: FeatureStore) -> Plan:
        """Tokenize the texts that the store lacks, and count."""
        distinct = list(dict.fromkeys(texts))
        missing = [text for text in distinct if text not in store]
        tokens = sum(sum(token_lengths(backbone, shard, store.facts["prompt"])) for shard in shards_of(missing))
        free = shutil.disk_usage(store.folder).free
        return cls(len(distinct), missing, tokens, store.bytes_for(len(missing)), free)

    def check(self) -> None:
        """Refuse what the disk cannot hold.

        Raises:
            OSError: With what is needed and what there is.
        """
        if self.bytes > self.free:
            raise OSError(
                f"the features need {self.bytes / 1e9:.2f} GB and the disk has {self.free / 1e9:.2f} GB left; take "
                "another disk, dtype bfloat16, or compress them"
            )


def extract(
    backbone: LayerTransformer,
    texts: Iterable[str],
    store: FeatureStore | None = None,
    *,
    prompt: str | None = None,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
) -> LayerTable:
    """Layer features of the distinct texts; with a store only those that it lacks are computed.

    Args:
        backbone: The frozen language model.
        texts: Any texts; equal ones are computed once.
        store: Where to keep the features; None keeps them in memory alone.
        prompt: Goes in front of each text; a store has its own.
        batch_tokens: Padded tokens in a batch; see `BatchRunner`.
        progress: Called after each batch.

    Returns:
        The features of all ``texts``.

    Raises:
        ValueError: If the store is for another prompt.
        FloatingPointError: If a layer is not finite; nothing of its shard is stored.
        MemoryError: If a single text does not fit into memory.
    """
    distinct = list(dict.fromkeys(texts))
    if store is not None and prompt and prompt != store.facts["prompt"]:
        raise ValueError(f"prompt is {prompt!r}; the store {store.folder} is for {store.facts['prompt']!r}")
    if store is not None:
        fill(store, backbone, distinct, batch_tokens=batch_tokens, progress=progress)
        return store.table(distinct)
    extractor = LayerExtractor(backbone, batch_tokens=batch_tokens, prompt=prompt)
    layers = extractor(distinct, tell=_Count(extractor, len(distinct), progress))
    rows = {text: row for row, text in enumerate(distinct)}
    return LayerTable(rows, layers, store_digest(backbone, prompt), prompt=prompt or None)


def fill(
    store: FeatureStore,
    backbone: LayerTransformer,
    texts: Iterable[str],
    *,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Compute the features that a store lacks; after a crash the same call goes on with the shard that it was at.

    Args:
        store: Where to keep the features.
        backbone: The frozen language model that the store is for.
        texts: Any texts.
        batch_tokens: Padded tokens in a batch; see `BatchRunner`.
        progress: Called after each batch.

    Raises:
        ValueError: If the store is for something else than this backbone, or too few texts for its compression.
        FloatingPointError: If a layer is not finite; nothing of its shard is stored.
        MemoryError: If a single text does not fit into memory.
    """
    extractor, missing = begin(store, backbone, texts, batch_tokens)
    tell = _Count(extractor, len(missing), progress)
    for shard in shards_of(fit_basis(store, extractor, missing, tell)):
        store.add(shard, extractor(shard, store, tell))


def begin(
    store: FeatureStore, backbone: LayerTransformer, texts: Iterable[str], batch_tokens: int | None
) -> tuple[LayerExtractor, list[str]]:
    """How every filling of a store begins: what computes its features, and the texts that it lacks.

    Raises:
        ValueError: If the store is for something else than this backbone.
    """
    check_store(store, backbone)
    extractor = LayerExtractor(backbone, batch_tokens=batch_tokens, prompt=store.facts["prompt"])
    return extractor, [text for text in dict.fromkeys(texts) if text not in store]


def check_store(store: FeatureStore, backbone: LayerTransformer) -> None:
    """Refuse a store that is for something else than what a backbone makes with its present settings.

    Raises:
        ValueError: With what differs.
    """
    facts = store_facts(backbone, store.facts["prompt"])
    if other := sorted(key for key, value in facts.items() if store.facts.get(key) != value):
        raise ValueError(
            f"{store.folder} is for another backbone or other settings ({', '.join(other)}); take the one of "
            "FeatureStore.for_backbone"
        )


def fit_basis(
    store: FeatureStore, extractor: LayerExtractor, texts: Sequence[str], tell: Callable[[int], None] | None = None
) -> Sequence[str]:
    """Fit the compression of a store on the first texts, if it has one and it is not fitted, and store those texts.

    Returns:
        The texts that are left.

    Raises:
        ValueError: If there are too few texts.
    """
    if store.facts["compress"] is None or store.basis is not None or not texts:
        return texts
    if len(texts) < LEAST_SAMPLE:
        raise ValueError(
            f"a compression is fitted on the first texts and needs at least {LEAST_SAMPLE}; got {len(texts)}. Extract "
            "the large corpus first, or leave compress out"
        )
    sample = [(shard, extractor(shard, tell=tell)) for shard in islice(shards_of(texts), SAMPLE_SHARDS)]
    store.fit_basis(torch.cat([layers for _, layers in sample]))
    for shard, layers in sample:
        store.add(shard, extractor.pack(layers, shard, store))
    return texts[SAMPLE_SHARDS * SHARD_TEXTS :]


def shards_of(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """The texts, `SHARD_TEXTS` at a time."""
    return (texts[start : start + SHARD_TEXTS] for start in range(0, len(texts), SHARD_TEXTS))


class _Count:
    """Adds up texts for a `Progress`."""

    def __init__(self, extractor: LayerExtractor, total: int, progress: Progress | None) -> None:
        self.extractor, self.total, self.progress, self.done = extractor, total, progress, 0

    def __call__(self, texts: int) -> None:
        self.done += texts
        if self.progress is not None:
            self.progress(self.done, self.total, self.extractor.runner.tokens)
