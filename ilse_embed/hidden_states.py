"""Where a model's hidden states are, and which model it is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor, nn
from transformers.utils.hub import extract_commit_hash


def find_blocks(model: Any) -> list[nn.Module]:
    """The blocks whose outputs are the model's hidden states, in order; empty if it does not tell.

    transformers notes on a model class which module's output is a hidden state (``_can_record_outputs``); hidden states
    of models without that note (bloom, falcon, mamba) are made in other ways and are not read by hooks.
    """
    recorded = (getattr(model, "_can_record_outputs", None) or {}).get("hidden_states")
    block_class = getattr(recorded, "target_class", recorded)
    if not (isinstance(block_class, type) and issubclass(block_class, nn.Module)):
        return []
    blocks = [module for module in model.modules() if isinstance(module, block_class)]
    return blocks if len(blocks) == model.config.get_text_config().num_hidden_layers else []


@contextmanager
def hooks_open(blocks: Sequence[nn.Module], take: Callable[[Tensor], None]) -> Iterator[None]:
    """Hand the input of the first block and the output of each but the last to ``take`` while the context is open.

    The hooks are temporary, so that the model stays picklable for worker processes.
    """

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        take(args[0] if args else kwargs["hidden_states"])

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        take(output[0] if isinstance(output, tuple) else output)

    handles = [blocks[0].register_forward_pre_hook(before, with_kwargs=True)]
    handles += [block.register_forward_hook(after) for block in blocks[:-1]]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def loaded_commit(name: str, model_kwargs: Mapping[str, Any]) -> str | None:
    """The commit of a model of the hub that was just loaded, as the cache tells it; None for a local folder."""
    if Path(name).is_dir():
        return None
    where = {key: model_kwargs.get(key) for key in ("cache_dir", "revision")}
    file = try_to_load_from_cache(name, str(Path(model_kwargs.get("subfolder") or "", "config.json")), **where)
    return extract_commit_hash(file, None) if isinstance(file, str) else None


def weights_digest(model: nn.Module) -> str:
    """Hash of a few numbers of each tensor, rounded to bfloat16: tells fine-tunes apart, not dtypes or devices."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.flatten()[:16].to("cpu", torch.bfloat16).float().numpy().tobytes())
    return digest.hexdigest()[:16]
