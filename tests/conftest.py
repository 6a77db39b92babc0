"""Tiny random backbones, made in a temporary folder, that AutoModel and AutoTokenizer load like a real one."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that spin on a shared machine cost 40 times the work
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast, set_seed

import ilse_embed
from ilse_embed import cli, extraction

torch.set_num_threads(1)
extraction.LEAST_SAMPLE = 2  # a compression may be fitted on the few texts of a test

SENTENCES = (
    "The ferry leaves the harbour every morning at seven.",
    "Please send me the invoice for last month.",
    "My sister plays the cello in a small orchestra, and the orchestra plays well.",
    "How long does it take to grow tomatoes from seed?",
    "Prices rose by 3 percent during the winter of 1998.",
    "Grüße aus München; naïve café, 漢字, العربية, 😀.",
)
"""What the tokenizers are trained on; also plain texts for the tests."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
)

TOKENIZERS: dict[str, dict[str, Any]] = {
    # as Pythia and GPT-2: an EOS token, nothing in front, no padding
    "plain": {"special": ["<|endoftext|>"], "eos_token": "<|endoftext|>"},
    # as Gemma and Llama: the tokenizer puts BOS in front
    "bos": {
        "special": ["<s>", "</s>", "<pad>"],
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "template": "<s> $A",
    },
    # as Qwen3-Embedding: EOS at the end, nothing in front
    "eos": {
        "special": ["<|endoftext|>"],
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "template": "$A <|endoftext|>",
    },
    # as BERT
    "cls": {
        "special": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "mask_token": "[MASK]",
        "template": "[CLS] $A [SEP]",
    },
    # as SmolLM2-Instruct: BOS known but not put in front, padding = EOS, a chat template
    "chat": {
        "special": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
    },
    # no special token at all
    "bare": {"special": []},
}

LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512}
BERT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}

BACKBONES: dict[str, tuple[str, str, dict[str, Any]]] = {
    # name: (model_type, tokenizer, config)
    "llama": ("llama", "plain", LLAMA),
    "mistral": ("mistral", "bos", LLAMA | {"sliding_window": 8}),
    "phi3": ("phi3", "bos", LLAMA),
    "qwen3": ("qwen3", "chat", LLAMA | {"head_dim": 8}),
    "gemma2": ("gemma2", "bos", LLAMA | {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", "bos", LLAMA | {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gpt_neox": ("gpt_neox", "plain", {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}),
    "gpt2": ("gpt2", "plain", GPT2),
    "opt": (
        "opt",
        "bos",
        {
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
        },
    ),
    "bert": ("bert", "cls", BERT),
    "roberta": ("roberta", "cls", BERT | {"max_position_embeddings": 520}),
    "modernbert": ("modernbert", "cls", BERT | {"local_attention": 8, "global_attn_every_n_layers": 2}),
    # no recorder of hidden states: these take the fallback
    "bloom": ("bloom", "bos", {"hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "falcon": (
        "falcon",
        "plain",
        {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 512},
    ),
    "mamba": ("mamba", "plain", {"hidden_size": 32, "num_hidden_layers": 3, "state_size": 4}),
}
"""Backbones by name; the tests run over all of them. The weights are drawn wide, so that a wrong position, a wrong mask
or a wrong layer shows."""

FALLBACK = ("bloom", "falcon", "mamba")


def make_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on `SENTENCES`, with the special tokens of a `TOKENIZERS` entry."""
    options = dict(TOKENIZERS[kind])
    special, template = options.pop("special"), options.pop("template", None)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    if template is not None:
        ids = [(token, tokenizer.token_to_id(token)) for token in special]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **options)


def make_backbone(folder: Path, model_type: str, tokenizer_kind: str, seed: int = 0, **config: Any) -> Path:
    """Write a random model and its tokenizer."""
    set_seed(seed)
    tokenizer = make_tokenizer(tokenizer_kind)
    ids = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }  # the defaults of the configurations lie outside the small vocabulary
    model = AutoModel.from_config(AutoConfig.for_model(model_type, vocab_size=len(tokenizer), **ids, **config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "mixer" not in name:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _seed() -> None:
    set_seed(0)


@pytest.fixture(scope="module")
def short_collections() -> Iterator[None]:
    """The trainer collects garbage at each start, over all that was imported."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def tiny_backbone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a backbone by its name in `BACKBONES`, perhaps with another tokenizer, seed or configuration."""
    made: dict[Any, Path] = {}

    def make(name: str = "llama", tokenizer: str | None = None, seed: int = 0, **config: Any) -> Path:
        key = (name, tokenizer, seed, *sorted(config.items()))
        if key not in made:
            model_type, usual, base = BACKBONES[name]
            folder = tmp_path_factory.mktemp(name, numbered=True)
            made[key] = make_backbone(folder, model_type, tokenizer or usual, seed, **(base | config))
        return made[key]

    return make


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real SmolLM2-135M-Instruct; skipped where it is not in the cache and cannot be fetched."""
    from ilse_embed import weights

    try:
        return weights.smollm2()
    except (weights.DownloadError, ImportError) as error:
        pytest.skip(f"no SmolLM2 here: {error}")


# The command line

KINDS = {
    "card_arrival": "Where is my",
    "lost_card": "I cannot find my",
    "top_up": "Please add money to the",
    "other": "Hm,",
}
THINGS = ("card", "old card", "new card", "travel card", "card, the blue one", "🙂 card", "carte dorée", "card!")


@dataclass
class Result:
    code: int
    out: str
    error: str


Ilse = Callable[..., Result]


@pytest.fixture
def ilse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Ilse]:
    """The command as the shell starts it, in this process and in a folder of its own."""
    monkeypatch.setenv("ILSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ILSE_DEBUG", raising=False)
    names = (None, "sentence_transformers", "mteb", "datasets", "httpx")
    levels = {name: logging.getLogger(name).level for name in names}
    handlers, verbosity = list(logging.getLogger().handlers), transformers.logging.get_verbosity()

    def run(*arguments: Any) -> Result:
        monkeypatch.setattr(sys, "argv", ["ilse", *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
            code: Any = 0
        except SystemExit as exit_:
            code = exit_.code or 0
        out, error = capsys.readouterr()
        return Result(code, out, error)

    yield run
    logging.getLogger().handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """STSBenchmark and Banking77Classification as the real mirror has them, with made-up rows."""
    root = tmp_path_factory.mktemp("mirror")

    def put(task: str, split: str, rows: list[dict[str, Any]]) -> None:
        (root / task).mkdir(exist_ok=True)
        parquet.write_table(pa.Table.from_pylist(rows), root / task / f"{split}.parquet")

    for split, times in (("train", 3), ("test", 1)):
        rows = [
            {"text": f"{start} {thing} {split} {i}", "label": number, "label_text": label}
            for number, (label, start) in enumerate(KINDS.items())
            for thing in THINGS
            for i in range(times)
        ]
        put("Banking77Classification", split, rows)
    starts = list(KINDS.values())
    for split, shift in (("train", 0), ("validation", 1), ("test", 2)):
        put(
            "STSBenchmark",
            split,
            [
                {"sentence1": f"{a} {one}.", "sentence2": f"{b} {two}{'!' * shift}", "score": score}
                for i, (a, one) in enumerate((a, one) for a in starts for one in THINGS)
                for b, two in ((starts[(i + shift) % 4], THINGS[(i * 3) % 8]),)
                for score in (5.0 * (a == b) * 0.5 + 2.5 * (one == two),)
            ],
        )
    return root


@pytest.fixture(scope="module")
def model(tiny_backbone: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model that was not trained, with a classifier."""
    torch.manual_seed(0)
    backbone = ilse_embed.LayerTransformer(str(tiny_backbone()), max_seq_length=64)
    folder = tmp_path_factory.mktemp("models") / "untrained"
    head = ilse_embed.LinearHead(12, list(KINDS))
    encoder = ilse_embed.build_encoder("cayley", 4, 32, hidden=12)
    ilse_embed.build(backbone, encoder, head=head).save(str(folder))
    return folder


def assert_refused(result: Result, message: str) -> None:
    """Exit code 1 and one message, of one line, without a traceback."""
    assert result.code == 1, result
    assert "Traceback" not in result.error + result.out
    errors = [line for line in result.error.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0], result
