"""Backbone and head joined: build, load, save, export; embeddings and class labels out."""

from __future__ import annotations

import ast
import json
from collections import OrderedDict
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize
from sentence_transformers.util import import_from_string, load_file_path
from torch import nn

import ilse_embed
from ilse_embed.artifact import INDEX, RECORD, replacing
from ilse_embed.encoders import LayerEncoder
from ilse_embed.heads import LinearHead
from ilse_embed.scaling import LayerScaling

STANDALONE_FILE = "ilse_embed.py"

STANDALONE_ROOMS = (
    *("graphs", "pooling", "tokens", "hidden_states", "modules", "scaling", "sinks", "backbone", "heads"),
    *("encoders.base", "encoders.mixing", "encoders.sets", "encoders.graph", "encoders.attention", "encoders.dense"),
)
"""Rooms that a model needs at run time, in the order of their imports."""


class IlseSentenceTransformer(SentenceTransformer):
    """A SentenceTransformer that resolves this package's own modules without ``trust_remote_code``.

    Attributes:
        provenance: How the head came to be: task, training_datasets, encoder, recipe, seed, validation score.
    """

    provenance: dict[str, Any]
    _moved_to: str | None = None  # `load` was told; the module's own name stays, as what mteb knows the model by

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.provenance = {}
        path = args[0] if args else kwargs.get("model_name_or_path")
        if isinstance(path, str) and (found := load_file_path(path, RECORD, **_where(kwargs))):
            self.provenance = json.loads(Path(found).read_text(encoding="utf-8"))
            self.provenance.pop("files", None)

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        """As in SentenceTransformer; no texts give an array of shape (0, m) instead of (0,)."""
        embeddings = super().encode(*args, **kwargs)
        if isinstance(embeddings, np.ndarray | torch.Tensor) and embeddings.shape == (0,):
            width = min(filter(None, (kwargs.get("truncate_dim"), self.get_embedding_dimension())))
            empty = embeddings.reshape(0, width)
            return empty.astype(np.float32) if isinstance(empty, np.ndarray) else empty
        return embeddings

    @property
    def labels(self) -> list[str]:
        """The class names of the linear head, in the order of `predict_proba`'s columns.

        Raises:
            ValueError: If the model has no linear head.
        """
        head = next((module for module in self if isinstance(module, LinearHead)), None)
        if head is None:
            raise ValueError("this model has no linear head (it was not trained on a classification task)")
        return head.labels

    def predict_proba(self, texts: Iterable[str], **kwargs: Any) -> NDArray[np.float32]:
        """Class probabilities.

        Args:
            texts: n texts.
            **kwargs: For `encode`, for example ``batch_size``.

        Returns:
            Array (n, C), rows sum to 1, columns as `labels`.

        Raises:
            ValueError: If the model has no linear head, or a single string is given.
        """
        if isinstance(texts, str):
            raise ValueError("predict takes a list of texts; got one string, wrap it: [text]")
        given, labels = list(texts), self.labels  # a model without a head is refused before anything runs
        if not given:
            return np.empty((0, len(labels)), dtype=np.float32)
        logits = torch.stack(self.encode(given, output_value="logits", **kwargs))
        probabilities: NDArray[np.float32] = logits.float().softmax(-1).cpu().numpy()
        return probabilities

    def predict(self, texts: Iterable[str], **kwargs: Any) -> list[str]:
        """The most probable class of each text; see `predict_proba`."""
        return [self.labels[column] for column in self.predict_proba(texts, **kwargs).argmax(-1)]

    def set_pooling_include_prompt(self, include_prompt: bool) -> None:
        """Whether the tokens of a prompt count in the mean of each layer."""
        for module in self:
            if hasattr(module, "include_prompt"):
                setattr(module, "include_prompt", include_prompt)  # noqa: B010 (nn.Module types attributes as tensors)

    def save(
        self,
        path: str,
        model_name: str | None = None,
        create_model_card: bool = True,
        train_datasets: list[str] | None = None,
        safe_serialization: bool = True,
    ) -> None:
        """Write the artifact whole; a failure leaves an earlier one as it was.

        Args:
            path: Folder; what an earlier save wrote there is replaced, other files stay.
            model_name: Name for the card.
            create_model_card: Whether to write README.md.
            train_datasets: Unused; the provenance tells.
            safe_serialization: Always safetensors.

        Raises:
            ValueError: If a file would be overwritten that no earlier save wrote.
        """
        with replacing(Path(path)) as folder:
            self._write(folder, self._moved_to, model_name, create_model_card, train_datasets)

    def _write(self, folder: Path, backbone: str | None, *options: Any) -> None:
        """Write the artifact and our record; refer to the backbone as told, if told."""
        super().save(str(folder), *options)
        if backbone is not None:
            file = folder / str(self[0].config_file_name)
            config = json.loads(file.read_text(encoding="utf-8"))
            file.write_text(json.dumps(config | {"backbone": backbone}, indent=4), encoding="utf-8")
        (folder / RECORD).write_text(json.dumps(self.provenance), encoding="utf-8")

    def _load_module_class_from_ref(self, class_ref: str, *args: Any, **kwargs: Any) -> type:
        package, _, name = class_ref.rpartition(".")
        if package == "ilse_embed" and name in ilse_embed.__all__:
            own: type = import_from_string(class_ref)
            return own
        loaded: type = super()._load_module_class_from_ref(class_ref, *args, **kwargs)
        return loaded

    def _get_model_config(self) -> dict[str, Any]:
        requirement = {"specifier": f">={ilse_embed.__version__}", "reason": "Its modules are in this package."}
        return super()._get_model_config() | {"requirements": {"ilse-embed": requirement}}

    def _create_model_card(self, path: str, *args: Any, **kwargs: Any) -> None:
        (Path(path) / "README.md").write_text(model_card(self), encoding="utf-8")


def build(
    backbone: nn.Module,
    encoder: LayerEncoder,
    scaling: LayerScaling | None = None,
    head: LinearHead | None = None,
    *,
    normalize: bool = True,
    prompt: str | None = None,
    provenance: dict[str, Any] | None = None,
) -> IlseSentenceTransformer:
    """Join the parts: backbone, [LayerScaling], encoder, [LinearHead], [Normalize].

    The linear head reads the embedding before it is normalised, as it was trained.

    Args:
        backbone: `LayerTransformer`, or a table of cached layers.
        encoder: Fuses the layers.
        scaling: Scales the layers before the encoder.
        head: Linear classifier.
        normalize: Whether embeddings get length 1.
        prompt: What the head was trained with in front of each text; becomes the default prompt.
        provenance: How the head came to be; mteb and the model card are told.
    """
    parts = {"backbone": backbone, "scaling": scaling, "encoder": encoder, "head": head}
    parts |= {"normalize": Normalize() if normalize else None}
    modules = OrderedDict((name, module) for name, module in parts.items() if module is not None)
    model = IlseSentenceTransformer(modules=modules)
    if prompt:
        # encode_query and encode_document prefer theirs, empty as they come, to the default.
        model.prompts |= dict.fromkeys(("default", "query", "document"), prompt)
        model.default_prompt_name = "default"
    model.provenance = provenance or {}
    return model


def load(path: str | Path, backbone: str | Path | None = None, **kwargs: Any) -> IlseSentenceTransformer:
    """Load a model that this package saved, from a folder or the hub.

    Args:
        path: Folder or name on the hub.
        backbone: Where the backbone is, if not where the artifact says. Saved again, the model refers to it if it
            referred to a folder before; a name on the hub stays, for it holds everywhere.
        **kwargs: For SentenceTransformer: ``device``, ``revision``, ``model_kwargs``, ...

    Raises:
        FileNotFoundError: If there is no model, or no backbone.
        ValueError: If the backbone is not the one that the artifact was made with, or the model is of another kind.
    """
    if backbone is not None:
        kwargs["model_kwargs"] = {**kwargs.get("model_kwargs", {}), "backbone": str(backbone)}
    folder = Path(path)
    if folder.is_dir() and not (folder / INDEX).is_file():
        raise FileNotFoundError(f"{folder} holds no saved model (no {INDEX})")
    if not folder.is_dir() and (folder.is_absolute() or str(path).startswith(".")):
        raise FileNotFoundError(f"there is no folder {folder}")
    if not folder.is_dir() and load_file_path(str(path), INDEX, **_where(kwargs)) is None:
        raise FileNotFoundError(f"there is no folder {folder}, and no saved model {path} on the hub or in its cache")
    model = IlseSentenceTransformer(str(path), **kwargs)
    if not any(isinstance(module, LayerEncoder) for module in model):
        raise ValueError(
            f"{path} has no layer encoder, only {[type(module).__name__ for module in model]}; it was not saved by "
            "ilse_embed. Load it with SentenceTransformer, or train a head on it: ilse train --backbone ..."
        )
    if backbone is not None and Path(getattr(model[0], "backbone", "")).is_absolute():
        model._moved_to = str(Path(backbone).absolute() if Path(backbone).is_dir() else backbone)
    return model


def _where(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a model that tell where on the hub or in its cache the files are."""
    return {key: options[key] for key in ("token", "cache_folder", "revision", "local_files_only") if key in options}


def export_hub(model: IlseSentenceTransformer, folder: str | Path) -> None:
    """Save for a place where this package is not installed: with one Python file that holds the modules.

    ``SentenceTransformer(folder, trust_remote_code=True)`` then needs nothing beside sentence-transformers.

    Args:
        model: What to export.
        folder: Where to, as in `IlseSentenceTransformer.save`.

    Raises:
        ValueError: If the backbone is a folder of this machine and not saved with the model, or a file would be
            overwritten that no earlier save wrote.
    """
    name = str(model._moved_to or getattr(model[0], "backbone", ""))
    if ilse_embed._HOMES.get(type(model[0]).__name__) not in STANDALONE_ROOMS:
        raise ValueError(f"{type(model[0]).__name__} needs this package; save it and load it with ilse_embed.load")
    is_folder = Path(name).is_absolute()
    if is_folder and not model[0].save_backbone:
        raise ValueError(
            f"the backbone is the folder {name}, which other machines do not have; allowed are a name on the hub and a "
            'copy in the export. Make it with LayerTransformer(..., backbone="org/name") or save_backbone=True'
        )
    with replacing(Path(folder)) as staging:
        model._write(staging, Path(name).name if is_folder else model._moved_to)  # with a copy it is just told
        config_file = staging / "config_sentence_transformers.json"
        config = json.loads(config_file.read_text(encoding="utf-8"))
        del config["requirements"]  # this package
        config_file.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
        (staging / STANDALONE_FILE).write_text(standalone_source(), encoding="utf-8")


def standalone_source() -> str:
    """The source of `STANDALONE_ROOMS` as one file, without imports between them."""
    parts = [
        f'"""Modules of ilse-embed {ilse_embed.__version__}, gathered in one file."""\n',
        "from __future__ import annotations\n",
    ]
    for room in STANDALONE_ROOMS:
        source = Path(str(import_module(f"ilse_embed.{room}").__file__)).read_text(encoding="utf-8")
        lines = source.splitlines()
        body = ast.parse(source).body
        for node in [*body, *(part for top in body if isinstance(top, ast.ClassDef) for part in top.body)]:
            if _left_out(node):
                lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
        parts.append("\n".join(lines).strip())
    return "\n\n\n".join(parts) + "\n"


def _left_out(node: ast.stmt) -> bool:
    """Imports between our rooms, the one future import, and the name under which a class says it lives."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "__future__" or str(node.module).startswith("ilse_embed")
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__module__"


def model_card(model: IlseSentenceTransformer) -> str:
    """README.md of an artifact: what it is, how to load it, what it was trained on, its limits."""
    backbone = model[0]
    name = str(model._moved_to or getattr(backbone, "backbone", "unknown"))
    is_folder = Path(name).is_absolute()
    shown = Path(name).name if is_folder else name  # where it is on this machine is nobody else's business
    encoder = next(module for module in model if isinstance(module, LayerEncoder))
    saved = (
        "saved with it"
        if getattr(backbone, "save_backbone", False)
        else "not part of this artifact: it is loaded by name"
    )
    adapter = getattr(backbone, "adapter", None)
    tuned = (
        "frozen language model" if adapter is None else f"language model with a LoRA adapter of rank {adapter['rank']}"
    )
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    facts = model.provenance
    base = "" if is_folder else f"base_model: {name}\n"
    return f"""---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
{base}tags: [sentence-transformers, ilse-embed, feature-extraction, layer-fusion]
---

# {type(encoder).__name__} on {Path(name).name}

A {tuned}, one pooled vector for each of its {encoder.num_layers} layers (width {encoder.layer_width}),
and a {type(encoder).__name__} that fuses them into one embedding of width {model.get_embedding_dimension()}. Trained
parameters: {trained:,}. The backbone is {saved}.

| | |
| --- | --- |
| backbone | `{shown}`, revision `{getattr(backbone, "backbone_revision", None)}` |
| token pooling | `{getattr(backbone, "pooling", None)}` |
| trained on | {facts.get("task", "nothing")} |
| encoder, recipe | {facts.get("encoder", type(encoder).__name__)}, {facts.get("recipe", {}).get("name", "-")} |
| seed | {facts.get("seed", "-")} |
| validation | {facts.get("validation", "-")} |

```python
import ilse_embed

model = ilse_embed.load("PATH_OR_NAME")
embeddings = model.encode(["A sentence.", "Another one."])
```

or `SentenceTransformer("PATH_OR_NAME", trust_remote_code=True)`; the flag is for the modules of this artifact and
is not handed on to the backbone.

Limits: Python and sentence-transformers only; servers that read `config.json` alone cannot serve it. The licence of the
backbone holds for the backbone.
"""
