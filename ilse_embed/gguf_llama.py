"""A GGUF file of architecture llama as a normal transformers folder in float32."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ilse_embed.files import write_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import numpy.typing as npt
    from gguf import GGUFReader

_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
# A hyperparameter outside this list (rope scaling, embedding scale, experts) changes what the model computes, so a file
# that has one is refused instead of being converted to a model that runs and is wrong.
_HYPERPARAMETERS = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "vocab_size",
}
# Name in the GGUF -> whether every digit is split off on its own before the byte-level regex.
_PRE_TOKENIZERS = {"smollm": True, "gpt-2": False}
_CONTROL, _USER_DEFINED = 3, 4


def gguf_to_transformers(gguf: Path, output: Path) -> None:
    """Write a GGUF file of architecture `llama` with a byte-level BPE tokenizer as a transformers folder in float32.

    Args:
        gguf: The file to read; quantised tensors are dequantised.
        output: Folder to write to, made if needed. Writing is not atomic.

    Raises:
        ImportError: The package `gguf` is not installed.
        ValueError: Another architecture, tokenizer, hyperparameter or tensor than this conversion knows.

    Source:
        The GGUF specification and the conversion script of llama.cpp, which this function inverts.
    """
    reader = gguf_reader()(gguf)
    metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    shapes = {tensor.name: tuple(reversed(tensor.shape.tolist())) for tensor in reader.tensors}
    # Everything is checked and every small file is made before the slow part, so that a refusal comes at once.
    config = _config(metadata, shapes)
    tokenizer, tokenizer_config = _tokenizer(metadata, config["vocab_size"])
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / "config.json", config)
    write_json(output / "tokenizer_config.json", tokenizer_config)
    (output / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    _write_weights(reader, config, output / "model.safetensors")


def gguf_reader() -> type[GGUFReader]:
    """The reader class of the optional package gguf."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ImportError(
            'reading a GGUF file needs the package gguf; install it with: pip install "ilse-embed[demo]"', name="gguf"
        ) from error
    return GGUFReader


def _only(what: str, came: object, allowed: object) -> ValueError:
    """The error for a file that this conversion would get wrong."""
    return ValueError(
        f"cannot convert this GGUF file: {what} is {came!r}, allowed is {allowed!r}. Use a safetensors version of the "
        "model, or transformers' own from_pretrained(..., gguf_file=...)."
    )


def _config(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The `config.json` of a llama, from the metadata and the tensor shapes of a GGUF file."""
    if (architecture := metadata.get("general.architecture")) != "llama":
        raise _only("the architecture", architecture, "llama")
    own = {name.removeprefix("llama."): value for name, value in metadata.items() if name.startswith("llama.")}
    if unknown := sorted(set(own) - _HYPERPARAMETERS):
        raise _only("the list of unknown hyperparameters", unknown, [])
    if lists := sorted(name for name, value in own.items() if isinstance(value, list)):
        raise _only("the list of hyperparameters that differ between blocks", lists, [])
    try:
        width, heads, blocks = own["embedding_length"], own["attention.head_count"], own["block_count"]
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": width,
            "intermediate_size": own["feed_forward_length"],
            "num_hidden_layers": blocks,
            "num_attention_heads": heads,
            "num_key_value_heads": own.get("attention.head_count_kv", heads),
            "head_dim": own.get("attention.key_length", width // heads),
            "max_position_embeddings": own["context_length"],
            # GGUF stores a float32: 9.999999747378752e-06 is meant to be 1e-05.
            "rms_norm_eps": _shortest_float(own["attention.layer_norm_rms_epsilon"]),
            "rope_theta": _shortest_float(own.get("rope.freq_base", 10000.0)),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": "output.weight" not in shapes,
            "vocab_size": shapes["token_embd.weight"][0],
            # The file's values are float16 scale * 4-bit number + float16 offset: neither float16 nor bfloat16 holds
            # the result exactly, so the weights stay float32. Older releases of transformers read the longer name.
            "dtype": "float32",
            "torch_dtype": "float32",
        }
    except KeyError as error:
        raise _only(f"the entry {error.args[0]!r}", None, "a value") from error
    head_dim = config["head_dim"]
    for name in ("rope.dimension_count", "attention.value_length"):
        if own.get(name, head_dim) != head_dim:
            raise _only(name, own[name], head_dim)
    expected = {"token_embd.weight", "output_norm.weight"} | {
        f"blk.{block}.{name}" for block in range(blocks) for name in _BLOCK_TENSORS
    }
    if missing := sorted(expected - set(shapes)):
        raise _only("the list of missing tensors", missing, [])
    if unknown := sorted(set(shapes) - expected - {"output.weight"}):
        raise _only("the list of unknown tensors", unknown, [])
    for role in ("bos", "eos", "padding"):
        if (token := metadata.get(f"tokenizer.ggml.{role}_token_id")) is not None:
            config[f"{role.removesuffix('ding')}_token_id"] = token
    return config


def _shortest_float(value: float) -> float:
    """The decimal number with the fewest digits that rounds to the same float32."""
    import numpy as np

    return float(str(np.float32(value)))


def _tokenizer(metadata: Mapping[str, Any], vocab_size: int) -> tuple[str, dict[str, Any]]:
    """The text of `tokenizer.json` and the content of `tokenizer_config.json`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    prefix = "tokenizer.ggml."
    if (kind := metadata.get(f"{prefix}model")) != "gpt2":
        raise _only("the tokenizer", kind, "gpt2 (byte-level BPE)")
    if (split := metadata.get(f"{prefix}pre")) not in _PRE_TOKENIZERS:
        raise _only("the pre-tokenizer", split, sorted(_PRE_TOKENIZERS))
    if absent := [name for name in ("tokens", "token_type", "merges") if f"{prefix}{name}" not in metadata]:
        raise _only("the list of missing tokenizer entries", absent, [])
    tokens: list[str] = metadata[f"{prefix}tokens"]
    types: list[int] = metadata[f"{prefix}token_type"]
    vocab = {token: i for i, token in enumerate(tokens)}
    if not len(vocab) == len(tokens) == len(types) <= vocab_size:
        counts = (len(vocab), len(tokens), len(types))
        raise _only("the number of distinct tokens, tokens, token types", counts, f"one number <= {vocab_size}")
    merges = [(left, right) for left, right in (merge.split(" ") for merge in metadata[f"{prefix}merges"])]

    # No unknown token, as in SmolLM2: the few bytes that the vocabulary lacks (some control characters) give no token.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    # transformers' own GGUF path leaves the split into digits out; runs of white space before a number ("a  1") and
    # numbers in vocabularies with tokens of several digits then get other ids than in training.
    steps = [pre_tokenizers.Digits(individual_digits=True), byte_level] if _PRE_TOKENIZERS[split] else [byte_level]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    for wanted in (_CONTROL, _USER_DEFINED):
        added = [
            AddedToken(token, normalized=False, special=wanted == _CONTROL)
            for token, kind in zip(tokens, types, strict=True)
            if kind == wanted
        ]
        tokenizer.add_tokens(added)

    config: dict[str, Any] = {
        # The generic class takes tokenizer.json as it is; GPT2Tokenizer builds a pre-tokenizer of its own over it and
        # loses the split into digits.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    ids = {}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token_id := metadata.get(f"{prefix}{name}_token_id")) is not None:
            if token_id >= len(tokens):
                raise _only(f"the id of the {name} token", token_id, f"less than {len(tokens)}")
            ids[role] = token_id
            config[f"{role}_token"] = tokens[token_id]
    edges = [role for role in ("bos", "eos") if metadata.get(f"{prefix}add_{role}_token")]
    if absent := [role for role in edges if role not in ids]:
        raise _only("the list of tokens to add that have no id", absent, [])
    if edges:
        bos, eos = ([config[f"{role}_token"]] if role in edges else [] for role in ("bos", "eos"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos],
            pair=[*bos, "$A", *eos, *(f"{piece}:1" for piece in (*bos, "$B", *eos))],
            special_tokens=[(config[f"{role}_token"], ids[role]) for role in edges],
        )
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return tokenizer.to_str(pretty=False), config


def _write_weights(reader: GGUFReader, config: Mapping[str, Any], path: Path) -> None:
    """Dequantise all tensors and write them under transformers' names."""
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights: dict[str, npt.NDArray[np.float32]] = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype("float32", copy=False)
        if tensor.name in _TENSORS:
            name = _TENSORS[tensor.name]
        else:
            _, block, part = tensor.name.split(".", 2)
            name = f"model.layers.{block}.{_BLOCK_TENSORS[part]}"
            if count := heads.get(part.removesuffix(".weight")):
                values = _undo_rope_permutation(values, count)
        weights[name] = values
    # Without the metadata transformers refuses the file.
    save_file(weights, path, metadata={"format": "pt"})
    # safetensors makes its files private; in a cache for several users they must be as readable as their neighbours.
    path.chmod(path.with_name("config.json").stat().st_mode)


def _undo_rope_permutation(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of a query or key projection in the order of transformers.

    GGUF keeps the two parts of a rotated pair next to each other (0, 1), (2, 3), ...; transformers rotates row i of a
    head with row i + head_dim / 2.

    Shapes:
        weight: (heads * head_dim, width), in and out; for keys, `heads` is the number of key-value heads.
    """
    rows, width = weight.shape
    paired = weight.reshape(heads, rows // heads // 2, 2, width)
    return paired.swapaxes(1, 2).reshape(rows, width)
