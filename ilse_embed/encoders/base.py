"""What every encoder is: ``(B, L, d)`` layer features in, ``(B, m)`` embeddings out; and their registry."""

from __future__ import annotations

import inspect
import json
from abc import abstractmethod
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from ilse_embed.modules import HeadModule, check_layers

ENCODERS: dict[str, type[LayerEncoder]] = {}
"""Encoders by the name that the CLI and the recipes use."""

EncoderType = TypeVar("EncoderType", bound="type[LayerEncoder]")


def register(name: str) -> Callable[[EncoderType], EncoderType]:
    """Class decorator: enter an encoder in `ENCODERS`.

    Raises:
        ValueError: If the name is taken.
    """

    def enter(encoder: EncoderType) -> EncoderType:
        if name in ENCODERS:
            raise ValueError(f"the encoder name {name!r} is taken by {ENCODERS[name].__name__}")
        ENCODERS[name] = encoder
        return encoder

    return enter


class LayerEncoder(HeadModule):
    """Fuses the layers of a text into one embedding.

    Shapes:
        features["layer_embeddings"]: (B, L, d) -> features["sentence_embedding"]: (B, m)
    """

    def __init__(self, num_layers: int, layer_width: int) -> None:
        """Remember the shape of the layer features.

        Args:
            num_layers: Layers L.
            layer_width: Backbone width d.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_layers = num_layers
        self.layer_width = layer_width

    @abstractmethod
    def encode_layers(self, layers: Tensor) -> Tensor:
        """Fuse.

        Shapes:
            layers: (B, L, d) float32 -> (B, m)
        """

    @property
    def input_weight(self) -> str | None:
        """Name of the one weight that reads the layers; None where there is none.

        It is (m, d), or (m, L d) where it reads all layers side by side.
        """
        return None

    def widened(self, directions: Tensor) -> Self:
        """The encoder that gives for layers what this one gives for ``layers @ directions``, dropout aside.

        Shapes:
            directions: (d, r), where r is this encoder's layer width

        Raises:
            ValueError: If this encoder has no linear map that reads the layers.
        """
        if self.input_weight is None:
            raise ValueError(f"{type(self).__name__} has no linear map of the layers that could undo a compression")
        wide = type(self)(**self.get_config_dict() | {"layer_width": len(directions)})
        state = self.state_dict()
        weight = state[self.input_weight].unflatten(1, (-1, self.layer_width))  # (m, 1 or L, r)
        state[self.input_weight] = (weight @ directions.to(weight.device).T).flatten(1)
        wide.load_state_dict(state)
        return wide.train(self.training)

    @abstractmethod
    def get_embedding_dimension(self) -> int:
        """Embedding width m."""

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Add ``sentence_embedding``.

        Raises:
            ValueError: If the layer features have another depth or width than this encoder.
        """
        layers = features["layer_embeddings"]
        check_layers(layers, self.num_layers, self.layer_width)
        features["sentence_embedding"] = self.encode_layers(layers)
        return features


def build_encoder(name: str, num_layers: int, layer_width: int, **options: Any) -> LayerEncoder:
    """Make an encoder by name.

    Args:
        name: One of `ENCODERS`.
        num_layers: Layers L.
        layer_width: Backbone width d.
        **options: Arguments of the encoder's class.

    Raises:
        ValueError: If the name is unknown or the encoder does not take an option.
    """
    if name not in ENCODERS:
        raise ValueError(f"encoder is {name!r}; allowed are {json.dumps(sorted(ENCODERS))}")
    unknown = set(options) - set(encoder_options(name))
    if unknown:
        raise ValueError(f"encoder {name!r} has no option {sorted(unknown)}; it takes {sorted(encoder_options(name))}")
    return ENCODERS[name](num_layers, layer_width, **options)


def encoder_options(name: str) -> list[str]:
    """The options that an encoder takes beside the shape of the layer features."""
    return list(inspect.signature(ENCODERS[name]).parameters)[2:]


def options_of_others(name: str) -> set[str]:
    """The options of other encoders that would do nothing in this one."""
    return {option for other in ENCODERS for option in encoder_options(other)} - {*encoder_options(name)}


LAYER_POOLS = ("weighted", "mean", "sum")
"""Ways to pool over the layers."""


class LayerPool(nn.Module):
    """Pools over the layers: their mean, their sum, or a mean with trained weights, the same for every text.

    The weights are ``softmax(30 w)``, as those of `ScalarMix`, and start equal. Without the factor they would hardly
    move within a training at the learning rate of the maps.
    """

    def __init__(self, kind: str, num_layers: int) -> None:
        """Make the weights, (L,), for "weighted"."""
        super().__init__()
        self.kind = kind
        self.logits = nn.Parameter(torch.zeros(num_layers)) if kind == "weighted" else None

    def forward(self, states: Tensor) -> Tensor:
        """Pool.

        Shapes:
            states: (L, B, m) -> (B, m)
        """
        if self.logits is None:
            return states.mean(0) if self.kind == "mean" else states.sum(0)
        return ((30 * self.logits).softmax(0) @ states.flatten(1)).view(states.shape[1:])


def check_options(*, pool: str, **sizes: int) -> None:
    """Refuse an unknown pool over layers and negative sizes, when an encoder is built and not at its first batch.

    Raises:
        ValueError: With the option, what came and what is allowed.
    """
    if pool not in LAYER_POOLS:
        raise ValueError(f"pool is {pool!r}; allowed are {json.dumps(LAYER_POOLS)}")
    for name, size in sizes.items():
        if size < 0:
            raise ValueError(f"{name} is {size}; it must not be negative")


def last_norm(width: int, output_norm: bool) -> nn.Module:
    """What ends an encoder: a layer norm over the embedding, or nothing.

    Behind a ReLU all embeddings point into one corner of the space; the norm spreads them out.
    """
    return nn.LayerNorm(width) if output_norm else nn.Identity()


class FastDropout(nn.Dropout):
    """Dropout whose mask costs a quarter of the random numbers on a CPU, where they take longer than a small layer.

    Four elements share a 64-bit draw, so the probability is a multiple of 2^-16, and the scale is the exact one for it.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Zero each element with probability p and scale the others up, in training only.

        Shapes:
            (...) -> (...)
        """
        dropped = round(self.p * 2**16)
        if not self.training or not dropped or input.device.type != "cpu" or dropped == 2**16:
            return super().forward(input)
        draws = torch.empty((input.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
        kept = draws.view(torch.int16)[: input.numel()].view(input.shape) >= dropped - 2**15
        return input * kept.to(input.dtype).mul_(2**16 / (2**16 - dropped))


class LayerPositions(nn.Module):
    """Adds a trained vector to each layer; they start at 0."""

    def __init__(self, num_layers: int, width: int) -> None:
        """Make the vectors, (L, width)."""
        super().__init__()
        self.vectors = nn.Parameter(torch.zeros(num_layers, width))

    def forward(self, states: Tensor) -> Tensor:
        """Add.

        Shapes:
            states: (B, L, width) -> (B, L, width)
        """
        return states + self.vectors


def dense_blocks(width_in: int, width: int, depth: int, dropout: float) -> nn.Sequential:
    """``depth`` times Linear, ReLU, dropout; the first from ``width_in``, all to ``width``."""
    widths = [width_in] + [width] * depth
    blocks = (
        module
        for w_in, w_out in pairwise(widths)
        for module in (nn.Linear(w_in, w_out), nn.ReLU(), FastDropout(dropout))
    )
    return nn.Sequential(*blocks)
