"""What the modules behind the backbone have in common: float32, a configuration and safetensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from sentence_transformers.base.modules import Module
from torch import Tensor


def check_layers(layers: Tensor, num_layers: int, layer_width: int) -> None:
    """Refuse layer features of another depth or width.

    Shapes:
        layers: (B, L, d)

    Raises:
        ValueError: With what came and what is needed.
    """
    if layers.ndim != 3 or layers.shape[1:] != (num_layers, layer_width):
        raise ValueError(
            f"layer features have shape {tuple(layers.shape)}; needed is (B, {num_layers}, {layer_width}), "
            f"that is {num_layers} layers of width {layer_width}"
        )


def keep_dtype(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """What ``fn`` of `torch.nn.Module._apply` makes of a tensor that follows to another device but stays float32."""
    moved = fn(tensor)
    if tensor.is_floating_point() and moved.dtype != tensor.dtype:
        return tensor.to(device=moved.device)
    return moved


class HeadModule(Module):
    """A module behind the backbone: it stays float32 and saves its configuration and tensors.

    sentence-transformers casts every module to the dtype of the backbone; a head trained in float32 would lose digits
    in silence when the backbone is loaded in bfloat16.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow to another device, refuse another dtype."""
        super()._apply(lambda tensor: keep_dtype(fn, tensor), recurse)  # type: ignore[no-untyped-call]
        return self

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write ``config.json`` and, if there are tensors, ``model.safetensors``."""
        self.save_config(output_path)
        if self.state_dict():
            self.save_torch_weights(output_path)

    @classmethod
    def load(
        cls,
        model_name_or_path: str,
        subfolder: str = "",
        token: bool | str | None = None,
        cache_folder: str | None = None,
        revision: str | None = None,
        local_files_only: bool = False,
        init_defaults: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Read what `save` wrote, from a folder or the hub.

        Raises:
            ValueError: If a file of tensors is missing.
            RuntimeError: If the tensors do not fit the configuration.
        """
        source: dict[str, Any] = {
            "subfolder": subfolder,
            "token": token,
            "cache_folder": cache_folder,
            "revision": revision,
            "local_files_only": local_files_only,
        }
        module = cls(**cls.load_config(model_name_or_path, **source))
        if module.state_dict():
            cls.load_torch_weights(model_name_or_path, model=module, **source)
        return module
