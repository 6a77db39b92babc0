"""Texts -> layer features, once: the language model runs here and never again in training or search.

Letters: ``n`` texts, ``L`` layers, ``d`` backbone width.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from sentence_transformers.base.modules import InputModule
from sentence_transformers.util import batch_to_device
from torch import Tensor

from ilse_embed.files import write_atomically
from ilse_embed.scaling import LayerScaling
from ilse_embed.tokens import valid_unicode

if TYPE_CHECKING:
    from ilse_embed.backbone import LayerTransformer

logger = logging.getLogger(__name__)

BATCH_TOKENS = 2048
"""Padded tokens in a batch; on a CPU larger batches are no faster."""

SHARD_TEXTS = 1024
"""Texts in a shard; what a crash can cost at most."""

Progress = Callable[[int, int], None]
"""Called with (texts done, texts in all) after each batch."""


@dataclass(frozen=True)
class LayerTable:
    """Layer features in memory.

    Attributes:
        rows: The row of each text.
        layers: (n, L, d) float32.
    """

    rows: dict[str, int]
    layers: Tensor

    def select(self, texts: Iterable[str]) -> Tensor:
        """Features of some texts, in their order.

        Shapes:
            n texts -> (n, L, d)

        Raises:
            KeyError: If a text was not extracted.
        """
        return self.layers[self.indices(texts)]

    def indices(self, texts: Iterable[str]) -> Tensor:
        """Rows of some texts, in their order.

        Raises:
            KeyError: If a text was not extracted.
        """
        try:
            return torch.tensor([self.rows[text] for text in texts], dtype=torch.long)
        except KeyError as error:
            raise KeyError(f"no layer features of the text {error.args[0]!r}; extract it first") from None


class CachedLayers(InputModule):
    """Stands in for the backbone where the layer features of all texts are known: looks up rows, runs no model.

    Datasets stay text, so the stock trainer, losses and evaluators of sentence-transformers work unchanged.

    Shapes:
        features["input_ids"]: (B, 1) row numbers -> features["layer_embeddings"]: (B, L, d)
    """

    def __init__(self, table: LayerTable, backbone_module: LayerTransformer | None = None) -> None:
        """Keep the table outside of the module's state, so that no checkpoint copies it.

        Args:
            table: The features.
            backbone_module: The backbone that made them, for whoever asks for its identity.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.table = table
        self.__dict__["backbone_module"] = backbone_module  # not a submodule: it is neither moved nor saved
        self.tokenizer: Any = None

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **kwargs: Any) -> dict[str, Tensor]:
        """Texts -> row numbers.

        Raises:
            KeyError: If a text was not extracted.
            ValueError: If a prompt is given: features were extracted without.
        """
        if prompt:
            raise ValueError(f"cached layer features know no prompt; got {prompt!r}")
        return {"input_ids": self.table.indices(inputs)[:, None]}

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Row numbers -> ``layer_embeddings``."""
        rows, table = features["input_ids"][:, 0], self.table.layers
        features["layer_embeddings"] = table[rows.to(table.device)].to(rows.device)  # the table may stay off the GPU
        return features

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write an empty configuration: the table stays where it is."""
        self.save_config(output_path)


def extract(
    backbone: LayerTransformer,
    texts: Iterable[str],
    store: FeatureStore | None = None,
    *,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> LayerTable:
    """Layer features of the distinct texts; with a store only those that it lacks are computed.

    Args:
        backbone: The frozen language model.
        texts: Any texts; equal ones are computed once.
        store: Where to keep the features; None keeps them in memory alone.
        batch_tokens: Padded tokens in a batch.
        progress: Called after each batch.

    Returns:
        The features of all ``texts``.

    Raises:
        FloatingPointError: If a layer is not finite; nothing of its shard is stored.
    """
    distinct = list(dict.fromkeys(texts))
    missing = distinct if store is None else [text for text in distinct if text not in store]
    shape = (backbone.num_layers, backbone.get_embedding_dimension())
    in_memory = torch.empty(len(missing) if store is None else 0, *shape)
    done = 0
    for start in range(0, len(missing), SHARD_TEXTS):
        shard = missing[start : start + SHARD_TEXTS]
        part = torch.empty(len(shard), *shape) if store is not None else in_memory[start : start + SHARD_TEXTS]
        for rows, layers in layer_batches(backbone, shard, batch_tokens):
            part[rows] = layers
            done += len(rows)
            if progress is not None:
                progress(done, len(missing))
        if store is not None:
            store.add(shard, part)
    if store is not None:
        return store.table(distinct)
    return LayerTable({text: row for row, text in enumerate(distinct)}, in_memory)


def layer_batches(
    backbone: LayerTransformer, texts: Sequence[str], batch_tokens: int = BATCH_TOKENS
) -> Iterator[tuple[list[int], Tensor]]:
    """Run the backbone over batches of texts of like length.

    Yields:
        The positions of some texts, and their features (B, L, d) float32 on the CPU.

    Raises:
        FloatingPointError: If a layer is not finite, with the names of model, layer and text.
    """
    device = backbone.model.device
    for rows in length_batches(backbone, texts, batch_tokens):
        features = batch_to_device(backbone.preprocess([texts[row] for row in rows]), device)
        with torch.inference_mode():
            layers: Tensor = backbone(features)["layer_embeddings"].cpu()
        finite = torch.isfinite(layers).all(-1)
        if not finite.all():
            row, layer = (int(index) for index in (~finite).nonzero()[0])
            raise FloatingPointError(
                f"layer {layer} of {backbone.backbone!r} is not finite for the text {texts[rows[row]][:80]!r}; load "
                'the backbone in bfloat16 or float32 (model_kwargs={"dtype": ...}), not float16'
            )
        yield rows, layers


def length_batches(backbone: LayerTransformer, texts: Sequence[str], batch_tokens: int) -> list[list[int]]:
    """Positions of the texts in batches of at most ``batch_tokens`` padded tokens (or one text), longest first."""
    if not texts:
        return []
    ids = backbone.tokenizer(
        [valid_unicode(text) for text in texts], truncation=True, max_length=backbone.max_seq_length
    )["input_ids"]
    lengths = [max(1, len(tokens)) for tokens in ids]
    batches: list[list[int]] = []
    for row in sorted(range(len(texts)), key=lengths.__getitem__, reverse=True):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


@dataclass
class FeatureStore:
    """Layer features on disk, found by text.

    A folder with ``store.json``, which tells what made the features, and shards named by the hash of their content. A
    shard is written under another name, flushed and renamed, so a crash leaves whole shards only; a damaged one is
    named and never served.

    Attributes:
        folder: Where the store is.
        shape: Layers L and backbone width d.
        shards: Hashes of the texts in each shard file, by its name.
    """

    folder: Path
    shape: tuple[int, int]
    shards: dict[str, list[str]] = field(default_factory=dict)
    _where: dict[str, tuple[str, int]] = field(default_factory=dict, repr=False)
    _sound: set[str] = field(default_factory=set, repr=False)

    @classmethod
    def for_backbone(cls, root: Path, backbone: LayerTransformer) -> FeatureStore:
        """The store below ``root`` of what this backbone makes with its present settings; made if it is not there.

        Raises:
            OSError: If a shard is damaged or a file with its suffix is none of ours.
        """
        facts = store_facts(backbone)
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
        folder = root / f"{re.sub(r'[^A-Za-z0-9.-]+', '-', Path(backbone.backbone).name)}-{backbone.pooling}-{digest}"
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "store.json").exists():
            write_atomically(folder / "store.json", json.dumps(facts, indent=2, sort_keys=True).encode())
        return cls(folder, (backbone.num_layers, backbone.get_embedding_dimension())).refresh()

    def refresh(self) -> FeatureStore:
        """Read the index of all shards.

        Raises:
            OSError: If a shard is damaged or a file with its suffix is none of ours.
        """
        self.shards.clear()
        self._where.clear()
        self._sound.clear()
        for path in sorted(self.folder.glob("*.safetensors")):
            with _reading(path), safe_open(path, framework="pt") as shard:
                keys = json.loads(shard.metadata()["keys"])
                found, needed = shard.get_slice("layers").get_shape(), [len(keys), *self.shape]
                if found != needed:
                    raise ValueError(f"features of shape {found} instead of {needed}")
            self.shards[path.name] = keys
            self._where |= {key: (path.name, row) for row, key in enumerate(keys)}
        return self

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and _key(text) in self._where

    def add(self, texts: Sequence[str], layers: Tensor) -> None:
        """Write a shard.

        Shapes:
            n texts, layers (n, L, d)

        Raises:
            ValueError: If the features have another shape.
        """
        if layers.shape != (len(texts), *self.shape):
            raise ValueError(
                f"{len(texts)} texts need features of shape {(len(texts), *self.shape)}; got {layers.shape}"
            )
        keys = [_key(text) for text in texts]
        content = save({"layers": layers.contiguous()}, metadata={"keys": json.dumps(keys)})
        name = f"{len(self.shards):06d}-{hashlib.sha256(content).hexdigest()[:16]}.safetensors"
        write_atomically(self.folder / name, content)
        self.shards[name] = keys
        self._where |= {key: (name, row) for row, key in enumerate(keys)}
        self._sound.add(name)

    def table(self, texts: Iterable[str]) -> LayerTable:
        """Load the features of some texts.

        Raises:
            KeyError: If one is not in the store.
            OSError: If a shard is damaged.
        """
        distinct = list(dict.fromkeys(texts))
        wanted: dict[str, list[tuple[int, int]]] = {}
        for position, text in enumerate(distinct):
            if text not in self:
                raise KeyError(f"no layer features of the text {text!r} in {self.folder}; extract it first")
            name, row = self._where[_key(text)]
            wanted.setdefault(name, []).append((position, row))
        layers = torch.empty(len(distinct), *self.shape)
        for name, places in wanted.items():
            with _reading(self.folder / name):
                self._verify(name)
                with safe_open(self.folder / name, framework="pt") as shard:
                    stored = shard.get_tensor("layers")
            positions, rows = zip(*places, strict=True)
            layers[list(positions)] = stored[list(rows)].float()
        return LayerTable({text: row for row, text in enumerate(distinct)}, layers)

    def _verify(self, name: str) -> None:
        if name in self._sound:
            return
        with (self.folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
        if not name.endswith(f"-{digest}.safetensors"):
            raise ValueError(f"its content has the hash {digest}, not that of its name")
        self._sound.add(name)


def store_facts(backbone: LayerTransformer) -> dict[str, Any]:
    """Everything that the features of a text depend on, beside the text."""
    return {
        **backbone.backbone_facts,
        "backbone_revision": backbone.backbone_revision,
        "pooling": backbone.pooling,
        "max_seq_length": backbone.max_seq_length,
        "model_dtype": str(backbone.model.dtype).removeprefix("torch."),
        "format": 1,
    }


def fit_scaling(table: LayerTable, texts: Iterable[str]) -> LayerScaling:
    """Standardisation over the distinct texts of a training split."""
    return LayerScaling.fit(table.select(dict.fromkeys(texts)))


def _key(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Name the shard in whatever goes wrong; a damaged file makes safetensors and json raise many types."""
    try:
        yield
    except Exception as error:
        raise OSError(
            f"the shard {path} is damaged or none of ours ({error!r}); delete it and extract again"
        ) from error
