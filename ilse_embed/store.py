"""Layer features on disk: found by text, whole or not there, never served damaged.

Letters: ``n`` texts, ``L`` layers, ``d`` backbone width, ``r`` compressed width.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

import ilse_embed
from ilse_embed.compression import LayerBasis
from ilse_embed.features import LayerTable
from ilse_embed.files import write_atomically

if TYPE_CHECKING:
    from ilse_embed.backbone import LayerTransformer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""In what features may be stored."""


def dtype_of(name: str) -> torch.dtype:
    """A dtype by its name.

    Raises:
        ValueError: If it is not in `DTYPES`.
    """
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}; allowed are {json.dumps(list(DTYPES))}")
    return DTYPES[name]


NOTE, BASIS = "store.json", "basis.safetensors"


@dataclass
class FeatureStore:
    """Layer features on disk, found by text.

    A folder with ``store.json``, which tells what made the features, and shards named by the hash of their content. A
    shard is written under another name, flushed and renamed, so a crash leaves whole shards only; a damaged one is
    named and never served. Shards are memory-mapped: of one whose hash was checked, once in a process, only the rows
    asked for are read. Any number of processes may read while others write.

    Attributes:
        folder: Where the store is.
        facts: What made the features, as `store_facts` has it, and how they are stored.
        basis: The compression, where there is one and it is fitted.
        shards: Hashes of the texts in each shard file, by its name.
    """

    folder: Path
    facts: dict[str, Any]
    basis: LayerBasis | None = None
    shards: dict[str, list[str]] = field(default_factory=dict)
    _where: dict[str, tuple[str, int]] = field(default_factory=dict, repr=False)
    _sound: set[str] = field(default_factory=set, repr=False)

    @classmethod
    def for_backbone(
        cls,
        root: Path,
        backbone: LayerTransformer,
        *,
        dtype: str = "float32",
        prompt: str | None = None,
        compress: int | None = None,
    ) -> FeatureStore:
        """The store below ``root`` of what this backbone makes with its present settings; made if it is not there.

        Args:
            root: Folder of stores.
            backbone: The backbone.
            dtype: One of `DTYPES`. float32 keeps the features as they are; half as large is bfloat16, with 3 digits,
                and float16, with 4 digits and a largest value of 65504.
            prompt: What goes in front of each text.
            compress: Width r of `LayerBasis`; None stores layers as they are.

        Raises:
            ValueError: If an option is not among the allowed ones.
            OSError: If a file of the store is damaged or none of ours.
        """
        dtype_of(dtype)
        width = backbone.get_embedding_dimension()
        if compress is not None and not 1 <= compress <= width:
            raise ValueError(f"compress is {compress}; allowed are widths from 1 to the backbone's, {width}")
        facts = store_facts(backbone, prompt) | {"dtype": dtype, "compress": compress}
        kind = f"{re.sub(r'[^A-Za-z0-9.-]+', '-', Path(backbone.backbone).name)}-{backbone.pooling}"
        folder = root / f"{kind}-{_digest(facts)}"
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / NOTE).exists():
            write_atomically(folder / NOTE, _note(facts))
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path) -> FeatureStore:
        """A store that is there.

        Raises:
            FileNotFoundError: If the folder is no store.
            OSError: If a file of the store is damaged or none of ours.
        """
        if not (folder / NOTE).is_file():
            raise FileNotFoundError(f"{folder} is no feature store (it has no {NOTE})")
        store = cls(folder, {})
        with _reading(folder / NOTE):
            store._take_note(folder / NOTE)
        return store.refresh()

    @property
    def options(self) -> dict[str, Any]:
        """What `for_backbone` takes beside the backbone."""
        return {key: self.facts[key] for key in ("dtype", "prompt", "compress")}

    @property
    def shape(self) -> tuple[int, int]:
        """Layers L and stored width d or r."""
        return self.facts["num_layers"], self.facts["compress"] or self.facts["layer_width"]

    @property
    def dtype(self) -> torch.dtype:
        """In what features are stored."""
        return DTYPES[self.facts["dtype"]]

    def bytes_for(self, texts: int) -> int:
        """Bytes on disk of so many texts, to within the shards' headers."""
        return texts * (self.shape[0] * self.shape[1] * self.dtype.itemsize + 70)

    def refresh(self) -> FeatureStore:
        """Read the index of all shards.

        Raises:
            OSError: If a shard is damaged or a file with its suffix is none of ours.
        """
        self.shards.clear()
        self._where.clear()
        self._sound.clear()
        if self.facts["compress"] is not None and (self.folder / BASIS).exists():
            with _reading(self.folder / BASIS):
                self._take_basis(self.folder / BASIS)
        for path in self._shard_files():
            with _reading(path):
                self._index(path)
        return self

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and _key(text) in self._where

    def __getitem__(self, text: str) -> Tensor:
        """Features of one text, read where they are.

        Shapes:
            -> (L, d) or (L, r), float32

        Raises:
            KeyError: If it is not in the store.
            OSError: If its shard is damaged.
        """
        return self.table([text]).layers[0]

    def fit_basis(self, layers: Tensor) -> LayerBasis:
        """Fit the compression on features of a sample of texts and keep it; of two writers the first one wins.

        Shapes:
            layers: (n, L, d)
        """
        if not (self.folder / BASIS).exists():
            fitted = LayerBasis.fit(layers, self.facts["compress"])
            write_atomically(self.folder / BASIS, fitted.to_bytes(), overwrite=False)
        self.basis = LayerBasis.load(self.folder / BASIS)
        return self.basis

    def pack(self, layers: Tensor) -> Tensor:
        """Layer features as they are stored: compressed, if the store is, and in its dtype.

        Shapes:
            layers: (n, L, d) -> (n, L, d) or (n, L, r)
        """
        return (layers if self.basis is None else self.basis.compress(layers)).to(self.dtype)

    def add(self, texts: Sequence[str], packed: Tensor, number: int | None = None) -> None:
        """Write a shard.

        Shapes:
            n texts, packed (n, L, d) or (n, L, r)

        Args:
            texts: The texts.
            packed: Their features, from `pack`.
            number: Position of the shard in the listing; by default behind the others.

        Raises:
            ValueError: If the features have another shape or dtype.
        """
        if packed.shape != (len(texts), *self.shape) or packed.dtype != self.dtype:
            raise ValueError(
                f"{len(texts)} texts need features of shape {(len(texts), *self.shape)} and {self.dtype}; got "
                f"{packed.shape}, {packed.dtype}"
            )
        keys = [_key(text) for text in texts]
        index = {"store": self._identity(), "keys": keys}  # one entry: safetensors writes several in any order
        content = save({"layers": packed.contiguous()}, metadata={"index": json.dumps(index)})
        number = self.next_number() if number is None else number
        name = f"{number:06d}-{hashlib.sha256(content).hexdigest()[:16]}.safetensors"
        write_atomically(self.folder / name, content)
        self.shards[name] = keys
        self._where |= {key: (name, row) for row, key in enumerate(keys)}
        self._sound.add(name)

    def next_number(self) -> int:
        """Where the next shard comes in the listing."""
        return max((int(name.partition("-")[0]) for name in self.shards if name[:6].isdigit()), default=-1) + 1

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
            path = self.folder / name
            with _reading(path):
                self._verify(path)
                with safe_open(path, framework="pt") as shard:
                    stored = shard.get_tensor("layers")  # memory-mapped
            positions, rows = (torch.tensor(column) for column in zip(*places, strict=True))
            layers[positions] = stored.index_select(0, rows).float()
        places_of = {text: row for row, text in enumerate(distinct)}
        return LayerTable(places_of, layers, self._identity(), self.basis, self.facts["prompt"])

    @classmethod
    def problems(cls, folder: Path) -> Iterator[tuple[Path, str]]:
        """Read every byte of a store.

        Yields:
            Each file that is damaged or none of ours, and what is wrong with it.
        """
        store = cls(folder, {})
        checks: list[tuple[Path, Callable[[Path], None]]] = [(folder / NOTE, store._take_note)]
        if (folder / BASIS).exists():
            checks.append((folder / BASIS, store._take_basis))
        for path, check in [*checks, *((path, store._take_shard) for path in store._shard_files())]:
            try:
                check(path)
            except Exception as error:  # a damaged file makes safetensors and json raise many types
                yield path, str(error)

    def _shard_files(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("*.safetensors") if path.name != BASIS)

    def _take_note(self, path: Path) -> None:
        content = path.read_bytes()
        facts = json.loads(content)
        if content != _note(facts) or not self.folder.resolve().name.endswith(f"-{_digest(facts)}"):
            raise ValueError("its content is not what its folder's name says")
        self.facts = facts

    def _take_basis(self, path: Path) -> None:
        self.basis = LayerBasis.load(path)

    def _take_shard(self, path: Path) -> None:
        self._verify(path)
        if self.facts:  # else the note is damaged, which was told
            self._index(path)

    def _identity(self) -> str:
        """What a shard is of: the facts, and the compression that was fitted."""
        return _digest(self.facts) + ("" if self.basis is None else f"-{self.basis.digest}")

    def _index(self, path: Path) -> None:
        with safe_open(path, framework="pt") as shard:
            index = json.loads(shard.metadata()["index"])
            keys = index["keys"]
            layers = shard.get_slice("layers")
            found, needed = layers.get_shape(), [len(keys), *self.shape]
            if found != needed:
                raise ValueError(f"features of shape {found} instead of {needed}")
            if index["store"] != self._identity():
                raise ValueError(f"features of the store {index['store']} instead of {self._identity()}")
        self.shards[path.name] = keys
        self._where |= {key: (path.name, row) for row, key in enumerate(keys)}

    def _verify(self, path: Path) -> None:
        if path.name in self._sound:
            return
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
        if not path.name.endswith(f"-{digest}.safetensors"):
            raise ValueError(f"its content has the hash {digest}, not that of its name")
        self._sound.add(path.name)


def stores_below(root: Path) -> list[Path]:
    """Folders of stores: ``root`` itself or those in it."""
    return [root] if (root / NOTE).is_file() else sorted(path.parent for path in root.glob(f"*/{NOTE}"))


def remove_store(folder: Path) -> None:
    """Delete a store; the folder stays if there is something else in it."""
    (folder / NOTE).unlink()  # first: what a crash leaves is no store
    folder = folder.resolve()
    for path in [*folder.glob("*.safetensors"), *folder.glob(".*.tmp")]:
        path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def store_facts(backbone: LayerTransformer, prompt: str | None = None) -> dict[str, Any]:
    """Everything that the features of a text depend on, beside the text."""
    return {
        **backbone.backbone_facts,
        "backbone_revision": backbone.backbone_revision,
        "pooling": backbone.pooling,
        "max_seq_length": backbone.max_seq_length,
        "model_dtype": str(backbone.model.dtype).removeprefix("torch."),
        "prompt": prompt or None,
        "include_prompt": backbone.include_prompt if prompt else None,
        "ilse_embed": ilse_embed.__version__,
        "format": 2,
    }


def store_digest(backbone: LayerTransformer, prompt: str | None = None) -> str:
    """Identity of what a backbone makes, without a store."""
    return _digest(store_facts(backbone, prompt))


def _note(facts: dict[str, Any]) -> bytes:
    return (json.dumps(facts, indent=2, sort_keys=True) + "\n").encode()


def _digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def _key(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Name the file in whatever goes wrong; a damaged one makes safetensors and json raise many types."""
    try:
        yield
    except Exception as error:
        raise OSError(f"the file {path} is damaged or none of ours ({error!r}); delete it and extract again") from error
