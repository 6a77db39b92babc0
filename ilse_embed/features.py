"""Layer features in memory, and the module that stands in for the backbone where they are known.

Letters: ``B`` texts of a batch, ``n`` texts, ``L`` layers, ``d`` backbone width, ``r`` compressed width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sentence_transformers.base.modules import InputModule
from torch import Tensor

from ilse_embed.compression import LayerBasis
from ilse_embed.scaling import LayerScaling

if TYPE_CHECKING:
    from ilse_embed.backbone import LayerTransformer


@dataclass(frozen=True)
class LayerTable:
    """Layer features in memory.

    Attributes:
        rows: The row of each text.
        layers: (n, L, d) float32, or (n, L, r) if they are compressed.
        source: Tells what made the features, as the identity of a store does.
        basis: The compression, if there is one.
        prompt: What went in front of each text.
    """

    rows: dict[str, int]
    layers: Tensor
    source: str = ""
    basis: LayerBasis | None = None
    prompt: str | None = None

    def select(self, texts: Iterable[str]) -> Tensor:
        """Features of some texts, in their order.

        Shapes:
            n texts -> (n, L, d)

        Raises:
            KeyError: If a text was not extracted.
        """
        return self.layers.index_select(0, self.indices(texts))

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
            ValueError: If another prompt is given than the features were extracted with.
        """
        if prompt and prompt != self.table.prompt:
            raise ValueError(f"these features were extracted with the prompt {self.table.prompt!r}; got {prompt!r}")
        return {"input_ids": self.table.indices(inputs)[:, None]}

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Row numbers -> ``layer_embeddings``."""
        rows, table = features["input_ids"][:, 0], self.table.layers
        picked = table.index_select(0, rows.to(table.device))  # several times faster than table[rows]
        features["layer_embeddings"] = picked.to(rows.device)  # the table may stay off the GPU
        return features

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write an empty configuration: the table stays where it is."""
        self.save_config(output_path)


def fit_scaling(table: LayerTable, texts: Iterable[str]) -> LayerScaling:
    """Standardisation over the distinct texts of a training split."""
    return LayerScaling.fit(table.select(dict.fromkeys(texts)))
