"""Low-rank adaptation (LoRA) of the backbone: the baseline that trains the language model itself.

Same tasks, losses, validation and protocols as `ilse_embed.training`; but every step runs the language model forward
and backward, where a head learns from features that were computed once.

Letters: ``B`` texts, ``T`` tokens, ``L`` layers, ``d`` backbone width, ``r`` rank.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize
from torch import Tensor, nn

from ilse_embed.backbone import LayerTransformer
from ilse_embed.encoders import SingleLayer
from ilse_embed.heads import LinearHead
from ilse_embed.modules import keep_dtype
from ilse_embed.recipes import LoraOptions, Recipe
from ilse_embed.tasks import Task, at_most
from ilse_embed.training import Progress, TrainedHead, check_trainable, fit

ADAPTER = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."  # PEFT's files name tensors from its own wrapper on


class LoraTransformer(LayerTransformer):
    """A `LayerTransformer` with a LoRA adapter, the one part of it that learns. It needs the extra ``lora``.

    The weights of the backbone stay as they are and are not saved: an artifact has the adapter, in PEFT's own files,
    which ``PeftModel.from_pretrained`` reads too. The adapter is float32 whatever the backbone is.

    Shapes:
        token features (B, T) -> features["layer_embeddings"]: (B, L, d) float32, with gradients
    """

    __module__ = "ilse_embed"
    config_keys = [*LayerTransformer.config_keys, "adapter"]  # noqa: RUF012
    learns = True

    def __init__(self, model_name_or_path: str, *, adapter: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Load a backbone and put a new adapter into it, which changes nothing before it is trained.

        Args:
            model_name_or_path: See `LayerTransformer`.
            adapter: See `LoraOptions.adapter`; the defaults if None.
            **kwargs: For `LayerTransformer`.

        Raises:
            ImportError: If PEFT is not installed.
            ValueError: If there is no map of a target's name, PEFT has no targets for this architecture, or a copy of
                the backbone is to be saved.
        """
        if kwargs.get("save_backbone"):
            raise ValueError("a LoRA artifact is the adapter alone; save_backbone is for LayerTransformer")
        super().__init__(model_name_or_path, **kwargs)
        options = adapter or LoraOptions().adapter
        with torch.random.fork_rng():
            config = _inject(self.model, options)
        config.base_model_name_or_path = self.backbone
        for parameter in self.adapter_parameters():
            parameter.data = parameter.data.float()
        self.adapter = {**options, "targets": sorted(config.target_modules)}
        self.eval()

    @property
    def backbone_facts(self) -> dict[str, Any]:
        """What tells the backbone from others, and a hash of the adapter: so features and scores tell two apart."""
        tensors = self.adapter_tensors() if hasattr(self.model, "peft_config") else {}
        digest = hashlib.sha256()
        for name in sorted(tensors):
            digest.update(name.encode() + tensors[name].detach().cpu().contiguous().numpy().tobytes())
        return self._backbone_facts | ({"adapter": digest.hexdigest()[:16]} if tensors else {})

    @backbone_facts.setter
    def backbone_facts(self, facts: dict[str, Any]) -> None:
        self._backbone_facts = facts

    def adapter_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that learn."""
        return (parameter for parameter in self.model.parameters() if parameter.requires_grad)

    def adapter_tensors(self) -> dict[str, Tensor]:
        """The adapter's tensors, A (r, d) and B (k, r) of each adapted map, by PEFT's names."""
        from peft import get_peft_model_state_dict

        tensors: dict[str, Tensor] = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        return {PEFT_PREFIX + name: tensor for name, tensor in tensors.items()}

    def draw_adapter(self, seed: int) -> None:
        """Begin anew: A random, B zero."""
        from peft.tuners.lora import LoraLayer

        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for module in self.model.modules():
                if isinstance(module, LoraLayer):
                    module.reset_lora_parameters("default", init_lora_weights=True)  # type: ignore[no-untyped-call]

    def train(self, mode: bool = True) -> Self:
        """Only the adapter's dropout follows; the backbone stays in eval mode."""
        super().train(mode)
        for name, module in self.model.named_modules():
            if ".lora_dropout" in name:
                module.train(mode)
        return self

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write the adapter and the reference to the backbone."""
        self.save_config(output_path)
        config = copy.copy(self.model.peft_config["default"])
        config.inference_mode = True
        config.save_pretrained(output_path)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.adapter_tensors().items()}
        save_file(tensors, str(Path(output_path) / ADAPTER), metadata={"format": "pt"})

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", *args: Any, **kwargs: Any) -> Self:
        """Load the backbone that an artifact refers to, as `LayerTransformer.load`, and its adapter.

        Raises:
            FileNotFoundError: If a local backbone or the adapter is not there.
            ValueError: If the backbone or the adapter is not that of the artifact.
        """
        module = super().load(model_name_or_path, subfolder, *args, **kwargs)
        where = {key: kwargs[key] for key in ("token", "cache_folder", "revision", "local_files_only") if key in kwargs}
        cls.load_torch_weights(model_name_or_path, subfolder, model=module, **where)
        return module

    @classmethod
    def load_torch_weights(
        cls, model_name_or_path: str, subfolder: str = "", *args: Any, model: Self | None = None, **kwargs: Any
    ) -> Any:
        """Read an adapter; into ``model``, if it is given.

        Raises:
            FileNotFoundError: If there is none.
            ValueError: If it is for other maps.
        """
        file = cls.load_file_path(model_name_or_path, ADAPTER, subfolder, *args, **kwargs)
        if file is None:
            raise FileNotFoundError(f"{model_name_or_path} has no {ADAPTER}")
        tensors = load_file(file)
        if model is None:
            return tensors
        own = model.adapter_tensors()
        shapes, needed = ({name: tuple(one.shape) for name, one in some.items()} for some in (tensors, own))
        if shapes != needed:
            wrong = sorted(name for name in shapes | needed if shapes.get(name) != needed.get(name))
            raise ValueError(
                f"the adapter in {file} does not fit: {len(wrong)} tensors differ, the first is {wrong[0]}"
            )
        with torch.no_grad():
            for name, tensor in own.items():  # they share their memory with the model's
                tensor.copy_(tensors[name])
        return model

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        own = {id(parameter) for parameter in self.adapter_parameters()}
        super()._apply(lambda one: keep_dtype(fn, one) if id(one) in own else fn(one), recurse)  # type: ignore[no-untyped-call]
        return self


def train_lora(
    task: Task,
    backbone: LoraTransformer,
    options: LoraOptions | None = None,
    recipe: Recipe | None = None,
    *,
    seed: int = 0,
    prompt: str | None = None,
    checkpoints: Path | None = None,
    progress: Progress | None = None,
) -> TrainedHead:
    """Train the adapter of a backbone in place, and for classification a linear head with it.

    The embedding is the mean over the tokens of the last hidden state, pooled as the backbone was told;
    ``build(backbone, **trained.parts)`` is the model.

    Args:
        task: Training and validation split; the test split is not read.
        backbone: Made with ``options.adapter``; its adapter begins anew.
        options: Options of the training; the defaults if None.
        recipe: Loss, optimizer, weight decay and schedule; the recipe "default" if None.
        seed: Draws the adapter, the head, dropout and batches, and the rows if there is a budget.
        prompt: Goes in front of each text.
        checkpoints: See `ilse_embed.training.train`; a checkpoint has the adapter and the head, not the backbone.
        progress: Called after each epoch.

    Raises:
        ValueError: If the task cannot be trained on, the backbone has an adapter of other options, or ``checkpoints``
            holds something else.
        FloatingPointError: If no epoch has a finite validation score.
    """
    options = options or LoraOptions()
    check_trainable(task)
    asked = options.adapter | {"targets": sorted(options.targets or ())}
    if options.targets in (None, ("all-linear",)):  # PEFT chose the names
        asked["targets"] = backbone.adapter["targets"]
    if asked != backbone.adapter:
        raise ValueError(f"the backbone has the adapter {backbone.adapter}, not {asked}; make it with options.adapter")
    started = time.perf_counter()
    some = task if options.max_rows is None else at_most(task, options.max_rows, seed)
    chosen = options.applied(recipe or Recipe())
    width = int(backbone.get_embedding_dimension())
    encoder = SingleLayer(backbone.num_layers, width)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = LinearHead(width, some.labels) if task.kind == "classification" else None
    backbone.draw_adapter(seed)
    modules = [module for module in (backbone, encoder, head, Normalize()) if module is not None]
    prompts = {"prompts": {"default": prompt}, "default_prompt_name": "default"} if prompt else {}
    model = SentenceTransformer(modules=modules, device=str(backbone.model.device), **prompts)  # type: ignore[arg-type]
    provenance: dict[str, Any] = {
        "task": task.name,
        "training_datasets": [task.name],
        "dataset_revision": task.revision,
        "encoder": "lora",
        "lora": asdict(options) | {"targets": backbone.adapter["targets"]},
        "recipe": asdict(chosen),
        "seed": seed,
        "shots": task.shots,
        "rows": {split: len(some.splits[split]) for split in ("train", "validation")},
        "prompt": prompt,
        "labels": task.labels if head is not None else None,
    }
    settings = provenance | {"backbone": backbone._backbone_facts, "pooling": backbone.pooling}
    validation, epochs = fit(model, some, chosen, settings, seed=seed, checkpoints=checkpoints, progress=progress)
    return TrainedHead(
        None,
        encoder,
        None if head is None else head.cpu(),
        validation=validation,
        epochs=epochs,
        seconds=time.perf_counter() - started,
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        provenance=provenance | {"validation": round(validation, 4)},
    )


def _inject(model: nn.Module, options: dict[str, Any]) -> Any:
    """Put a new adapter into a model; returns PEFT's configuration of it.

    Raises:
        ImportError: If PEFT is not installed.
        ValueError: If there is no map of a target's name, or PEFT has no targets for this architecture.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ImportError("LoRA needs an extra: pip install 'ilse-embed[lora]'") from error
    targets = options["targets"]
    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if _is_map(module)}
    if unknown := sorted({target.rpartition(".")[2] for target in targets or ()} - linear - {"all-linear"}):
        raise ValueError(
            f'{type(model).__name__} has no linear map {unknown}; it has {sorted(linear)}, or "all-linear"'
        )
    config = LoraConfig(
        r=options["rank"],
        lora_alpha=options["alpha"],
        lora_dropout=options["dropout"],
        target_modules="all-linear" if targets and "all-linear" in targets else targets and list(targets),
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),  # GPT-2 transposes
    )
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise ValueError(
            f"PEFT puts no LoRA into {type(model).__name__} ({error}); name the targets: some of {sorted(linear)}, or "
            '"all-linear"'
        ) from error
    return config


def _is_map(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
