"""The frozen language model: texts -> one pooled vector per layer, inside the forward pass.

Letters: ``B`` texts, ``T`` tokens, ``L`` layers = hidden states including the embedding output, ``d`` backbone width.
Layer 0 is the input of the first block, layer L - 1 the output after the final norm.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from sentence_transformers.base.modules import Transformer
from torch import Tensor, nn

from ilse_embed.hidden_states import find_blocks, hooks_open, loaded_commit, weights_digest
from ilse_embed.pooling import TokenPooler, skipped_tokens
from ilse_embed.sinks import SINK_SHARE, first_token_share
from ilse_embed.tokens import (
    FillShort,
    adds_first_token,
    fill_short,
    put_bos_in_front,
    set_pad_token,
    tokenizer_digest,
    valid_unicode,
)

logger = logging.getLogger(__name__)

POOLINGS = ("mean", "mean_without_first", "mean_after_bos")
"""Ways to pool tokens: all of them; all but the first; all behind a BOS token, which is put in front if need be."""

DEFAULT_MAX_SEQ_LENGTH = 2048
"""Cap on the length in tokens when none is asked for; the model's own limit applies where it is lower."""

TEXT_ONLY = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}


class LayerTransformer(Transformer):
    """A frozen transformer that gives the pooled hidden state of every layer.

    A subclass of sentence-transformers' Transformer: prompts, truncation, devices, dtypes work as there. The model is
    in eval mode, gets no gradient, and runs without a language-model head. Hidden states are pooled by temporary hooks
    as soon as a block has made them, so memory does not grow with L; only architectures that do not tell which modules
    are their blocks (bloom, falcon, mamba) keep all of them for a batch.

    Shapes:
        token features (B, T) -> features["layer_embeddings"]: (B, L, d) float32
    """

    __module__ = "ilse_embed"
    config_keys = [  # noqa: RUF012
        *Transformer.config_keys,
        "pooling",
        "include_prompt",
        "max_seq_length",
        "backbone",
        "backbone_revision",
        "backbone_facts",
        "save_backbone",
    ]
    learns = False
    """Whether gradients reach into the backbone."""

    def __init__(
        self,
        model_name_or_path: str,
        *,
        pooling: str = "mean",
        include_prompt: bool = True,
        max_seq_length: int | None = None,
        on_truncate: str = "warn",
        backbone: str | None = None,
        backbone_revision: str | None = None,
        backbone_facts: dict[str, Any] | None = None,
        save_backbone: bool = False,
        modality_config: dict[str, Any] | None = None,
        module_output_name: str | None = None,
        model_kwargs: dict[str, Any] | None = None,
        processor_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Load and freeze a backbone.

        Args:
            model_name_or_path: Name on the hub or folder of anything that transformers' ``AutoModel`` loads.
            pooling: One of `POOLINGS`, or "sink_aware", for layers that nothing standardises: measure whether the first
                token is an attention sink and take "mean_without_first" if so, else "mean". Where the tokenizer puts a
                BOS token in front, that is the first token. ``self.pooling`` then names what was taken.
            include_prompt: Whether the tokens of a prompt count in the mean.
            max_seq_length: Longest text in tokens; by default the model's limit, at most 2048.
            on_truncate: "warn" (once), "error" or "ignore", when a text is longer than ``max_seq_length``.
            backbone: What an artifact records as its backbone; by default ``model_name_or_path``.
            backbone_revision: Commit that an artifact records; by default the commit that was loaded.
            backbone_facts: What a saved artifact expects of the backbone; checked against what was loaded.
            save_backbone: Whether saving writes a copy of the backbone instead of a reference to it.
            modality_config: See Transformer; text only by default, so that a chat template is never applied.
            module_output_name: See Transformer.
            model_kwargs: For ``AutoModel.from_pretrained``. Without a ``dtype`` it is float32 where there is no GPU,
                for bfloat16 is slow on most CPUs, and else the checkpoint's.
            processor_kwargs: For the tokenizer. Padding is on the right and special tokens written out in a text are
                plain text unless asked otherwise here.
            **kwargs: For Transformer.

        Raises:
            ValueError: If an option is not among the allowed ones, or the backbone is not the expected one.
        """
        if pooling not in (*POOLINGS, "sink_aware"):
            raise ValueError(f"pooling is {pooling!r}; allowed are {json.dumps(['sink_aware', *POOLINGS])}")
        if on_truncate not in ("warn", "error", "ignore"):
            raise ValueError(f'on_truncate is {on_truncate!r}; allowed are "warn", "error", "ignore"')
        if max_seq_length is not None and max_seq_length < 1:
            raise ValueError(f"max_seq_length is {max_seq_length}; it must be at least 1")
        if kwargs.get("backend", "torch") != "torch":
            raise ValueError(f"backend is {kwargs['backend']!r}; hooks on the layers need backend='torch'")
        if modality_config is None:
            modality_config, module_output_name = TEXT_ONLY, "token_embeddings"
        model_kwargs = dict(model_kwargs or {})
        if "dtype" not in model_kwargs and "torch_dtype" not in model_kwargs and not torch.accelerator.is_available():
            model_kwargs["dtype"] = torch.float32
        processor_kwargs = {"padding_side": "right", "split_special_tokens": True} | dict(processor_kwargs or {})
        super().__init__(
            model_name_or_path,
            modality_config=modality_config,
            module_output_name=module_output_name,
            model_kwargs=model_kwargs,
            processor_kwargs=processor_kwargs,
            **kwargs,
        )
        self.model.requires_grad_(False)
        self.model.eval()
        self.include_prompt = include_prompt
        self.save_backbone = save_backbone
        is_folder = Path(model_name_or_path).is_dir()
        self.backbone = backbone or (str(Path(model_name_or_path).absolute()) if is_folder else model_name_or_path)
        self.backbone_revision = backbone_revision or loaded_commit(model_name_or_path, model_kwargs)
        self.truncated_texts = 0
        self.longest_truncated = 0
        set_pad_token(self.tokenizer)
        self.max_seq_length = min(self.tokenizer.model_max_length, DEFAULT_MAX_SEQ_LENGTH)
        self.on_truncate = "ignore"

        self._blocks = find_blocks(self.model)
        if not self._blocks:
            self.model.config.output_hidden_states = True
        self.num_layers = self.model.config.get_text_config().num_hidden_layers + 1
        self.backbone_facts = self._facts()
        if backbone_facts is not None:
            self._check_facts(backbone_facts)
        self._set_pooling(pooling)
        if backbone_facts is None and pooling != "sink_aware":  # the sink was not measured, and no artifact vouches
            self.reduce_layers(self.preprocess(["a"]), torch.Tensor.detach)  # refuses what gives no layers before work
        self.on_truncate = on_truncate  # only now: texts that measure the sink are not the user's
        if max_seq_length is not None:
            self.max_seq_length = max_seq_length

    @property
    def tokenizer(self) -> Any:  # type: ignore[override]
        """The tokenizer."""
        return super().tokenizer

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode: the backbone is frozen, dropout included."""
        super().train(mode)
        self.model.eval()
        return self

    def preprocess(
        self, inputs: Sequence[Any], prompt: str | None = None, processing_kwargs: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Tokenize, and count texts that are cut off.

        A text of too few tokens gets one in front: without tokens it has no vector, and a single token behind which the
        first one is left out is nothing but a sink.

        Half a surrogate pair, as a cut JSON string leaves it, is no character and counts as U+FFFD.

        Raises:
            ValueError: If a text is too long and ``on_truncate`` is "error".
        """
        inputs = [valid_unicode(text) if isinstance(text, str) else text for text in inputs]
        features: dict[str, Any] = super().preprocess(inputs, prompt, processing_kwargs, **kwargs)
        if "attention_mask" in features:
            fill_short(self.tokenizer, features, self._least_tokens())
            lengths = features["attention_mask"].sum(1)
        elif "cu_seq_lens_q" in features:
            lengths = features["cu_seq_lens_q"].diff()
        else:  # no texts
            return features
        if self.on_truncate != "ignore":
            self._report_truncation(inputs, prompt, lengths)
        if "attention_mask" in features and self.tokenizer.padding_side == "left" and self._positions_need_help():
            features["position_ids"] = (features["attention_mask"].cumsum(1) - 1).clamp(min=0)
        return features

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Run the backbone and pool every layer; also keeps ``token_embeddings`` of the last layer."""
        skip = skipped_tokens(features, skip_first=self.pooling != "mean", include_prompt=self.include_prompt)
        pool = TokenPooler(features, skip)
        features["layer_embeddings"] = torch.stack(self.reduce_layers(features, pool, **kwargs), dim=1)
        return features

    def reduce_layers(
        self, features: dict[str, Any], reduce: Callable[[Tensor], Tensor], **kwargs: Any
    ) -> list[Tensor]:
        """Apply ``reduce`` to the hidden states of each layer as soon as they are there.

        Args:
            features: Tokens; gets ``token_embeddings`` of the last layer.
            reduce: Takes (B, T, d), or (1, total, d) for a flattened batch.
            **kwargs: For the model.

        Returns:
            L results, on the device of the last one.

        Raises:
            RuntimeError: If the model did not give one hidden state for each layer.
        """
        with torch.set_grad_enabled(self.learns and torch.is_grad_enabled()):
            if not self._blocks:
                super().forward(features, **kwargs)
                reduced = [reduce(hidden) for hidden in features.pop("all_layer_embeddings", ())]
            else:
                reduced = []
                with hooks_open(self._blocks, lambda hidden: reduced.append(reduce(hidden))):
                    super().forward(features, **kwargs)
                reduced.append(reduce(features[self.module_output_name]))
        if len(reduced) != self.num_layers:
            raise RuntimeError(
                f"{type(self.model).__name__} gave {len(reduced)} hidden states in one forward pass, expected "
                f"{self.num_layers}; this architecture (an encoder-decoder?) does not work as a backbone"
            )
        return [layer.to(reduced[-1].device) for layer in reduced]

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write the reference to the backbone; the backbone itself only with ``save_backbone``."""
        if self.save_backbone:
            super().save(output_path, *args, safe_serialization=safe_serialization, **kwargs)
        else:
            self.save_config(output_path)

    @classmethod
    def load(  # type: ignore[override]  # as the base class's, which differs from its own base class
        cls,
        model_name_or_path: str,
        subfolder: str = "",
        token: bool | str | None = None,
        cache_folder: str | None = None,
        revision: str | None = None,
        local_files_only: bool = False,
        model_kwargs: dict[str, Any] | None = None,
        processor_kwargs: dict[str, Any] | None = None,
        config_kwargs: dict[str, Any] | None = None,
        backend: str = "torch",
        **kwargs: Any,
    ) -> Self:
        """Load the backbone that an artifact refers to.

        ``model_kwargs={"backbone": ...}`` names another place of the same backbone, for example a local folder. The
        flag ``trust_remote_code`` is for the artifact's own modules and never reaches the backbone.

        Raises:
            FileNotFoundError: If a local backbone is not there.
            ValueError: If the backbone is not the one that the artifact was made with.
        """
        model_kwargs = dict(model_kwargs or {})
        moved_to = model_kwargs.pop("backbone", None)
        init = cls._load_init_kwargs(
            model_name_or_path,
            subfolder=subfolder,
            token=token,
            cache_folder=cache_folder,
            revision=revision,
            local_files_only=local_files_only,
            trust_remote_code=False,
            model_kwargs=model_kwargs,
            processor_kwargs=processor_kwargs,
            config_kwargs=config_kwargs,
            backend=backend,
        )
        if init.get("save_backbone") and moved_to is None:
            return cls(model_name_or_path, **init)
        backbone = moved_to or init["backbone"]
        beside = Path(model_name_or_path) / backbone
        if beside.is_dir():  # a bundle: the reference is relative to the artifact
            backbone = str(beside)
        elif Path(backbone).is_absolute() and not Path(backbone).is_dir():
            raise FileNotFoundError(
                f"the backbone {backbone!r} of {model_name_or_path!r} is not on this machine; pass where it is: "
                f'ilse_embed.load(path, backbone=...), or model_kwargs={{"backbone": ...}} for SentenceTransformer'
            )
        for name in ("model_kwargs", "processor_kwargs", "config_kwargs"):  # revision and subfolder are the artifact's
            init[name] |= {"subfolder": "", "revision": None if moved_to else init.get("backbone_revision")}
        return cls(backbone, **init)

    def __repr__(self) -> str:
        """Name, backbone and pooling."""
        return f"LayerTransformer({self.backbone!r}, num_layers={self.num_layers}, pooling={self.pooling!r})"

    def _get_prompt_length(self, prompt: str, **kwargs: Any) -> int | None:
        """Tokens of the prompt; a space at its end is left to the text, whose first token takes it in."""
        return super()._get_prompt_length(prompt.rstrip(" "), **kwargs)

    def _can_flatten_inputs(self) -> bool:
        can = bool(super()._can_flatten_inputs())
        if can:
            self.data_collator: Any = FillShort(self.data_collator, self.tokenizer, self._least_tokens)
        return can

    def _least_tokens(self) -> int:
        return 1 if self.pooling == "mean" else 2

    def _report_truncation(self, inputs: Sequence[Any], prompt: str | None, lengths: Tensor) -> None:
        limit = self.tokenizer.model_max_length
        full = (lengths >= limit).nonzero().flatten().tolist()
        if not full:
            return
        texts = [(prompt or "") + str(inputs[row]) for row in full]
        true_lengths = [len(ids) for ids in self.tokenizer(texts, truncation=False, verbose=False)["input_ids"]]
        too_long = [length for length in true_lengths if length > limit]
        if not too_long:
            return
        message = (
            f"{len(too_long)} of {len(inputs)} texts have more than max_seq_length={limit} tokens (the longest "
            f"{max(too_long)}) and lose their end; raise max_seq_length or split them"
        )
        if self.on_truncate == "error":
            raise ValueError(message)
        if self.truncated_texts == 0:
            logger.warning(
                "%s. Said once; truncated_texts and longest_truncated of the module go on counting.", message
            )
        self.truncated_texts += len(too_long)
        self.longest_truncated = max(self.longest_truncated, *too_long)

    def _positions_need_help(self) -> bool:
        """Whether left padding would shift absolute positions: the model takes them and does not derive them itself."""
        derives = any(
            hasattr(child, "padding_idx") for child in self.model.children() if not isinstance(child, nn.Embedding)
        )
        return "position_ids" in self._declared_forward_params and not derives

    def _set_pooling(self, pooling: str) -> None:
        if pooling == "sink_aware":
            self.pooling = "mean"
            pooling = "mean_without_first" if float(first_token_share(self).max()) > SINK_SHARE else "mean"
        self.pooling = pooling
        if pooling == "mean_after_bos" and not adds_first_token(self.tokenizer):
            put_bos_in_front(self.tokenizer)

    def _facts(self) -> dict[str, Any]:
        return {
            "num_layers": self.num_layers,
            "layer_width": self.get_embedding_dimension(),
            "tokenizer": tokenizer_digest(self.tokenizer),
            "weights": weights_digest(self.model),
        }

    def _check_facts(self, expected: dict[str, Any]) -> None:
        """Refuse a backbone of another depth, width or tokenizer; warn about other weights.

        Raises:
            ValueError: With what came and what is needed.
        """
        names = {"num_layers": "layers", "layer_width": "width", "tokenizer": "tokenizer (hash)"}
        wrong = [
            f"{words} {self.backbone_facts[key]} where the artifact needs {expected[key]}"
            for key, words in names.items()
            if key in expected and self.backbone_facts[key] != expected[key]
        ]
        if wrong:
            raise ValueError(
                f"{self.model.name_or_path!r} is not the backbone of this artifact: it has {'; '.join(wrong)}. "
                "Load the artifact with the backbone that it was trained on."
            )
        if expected.get("weights") not in (None, self.backbone_facts["weights"]):
            logger.warning(
                "%r has the shape of the artifact's backbone but other weights (another fine-tune, or quantised); "
                "embeddings will differ from those that the artifact was evaluated with",
                self.model.name_or_path,
            )
