"""Embeddings of files of any size: constant memory, sharded Parquet, resumable, one text exactly once.

Letters: ``n`` texts, ``m`` embedding width.
"""

from __future__ import annotations

import hashlib
import io
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet
from sentence_transformers import SentenceTransformer

from ilse_embed.embedding import TextEmbedder
from ilse_embed.files import claim, write_atomically
from ilse_embed.identity import model_revision
from ilse_embed.tables import SUFFIXES, Record, TextFile
from ilse_embed.tokens import valid_unicode

arrow: Any = pa

CHUNK_TEXTS = 8192
"""Texts in a part of the output; what a crash can cost at most."""

Progress = Callable[[int, int], None]
"""Called with (texts done, tokens done) after each part."""


@dataclass(frozen=True)
class Chunk:
    """Some texts of a file, which become one part of the output.

    Attributes:
        number: Of the part.
        file: Number of the file.
        start: Place of the first text in the file.
        row: Number of the first text in the file.
        texts: How many.
        digest: Hash of the texts.
    """

    number: int
    file: int
    start: int
    row: int
    texts: int
    digest: str


@dataclass(frozen=True)
class BulkJob:
    """What to embed and where to: the same for every process that takes a share of it.

    Attributes:
        files: The texts.
        output: Folder of the parts.
        chunk_texts: Texts in a part.
        keep_texts: Whether the parts hold the texts too.
        prompt: What goes in front of each text; None takes the model's default.
        prompt_name: A prompt of the model by its name.
    """

    files: tuple[TextFile, ...]
    output: Path
    chunk_texts: int = CHUNK_TEXTS
    keep_texts: bool = True
    prompt: str | None = None
    prompt_name: str | None = None

    def claim(self, model: SentenceTransformer) -> None:
        """Note in the output folder what it is for.

        Raises:
            ValueError: If it is for something else: another model, other texts, another division into parts.
        """
        columns = {(file.settled().column, file.id_column) for file in self.files}
        settings = {
            "model": model_revision(model),
            "width": model.get_embedding_dimension(),
            "files": [file.path.name for file in self.files],
            "columns": sorted(map(list, columns), key=str),
            "chunk_texts": self.chunk_texts,
            "keep_texts": self.keep_texts,
            "prompt": [self.prompt, self.prompt_name],
        }
        claim(self.output, settings, "embeddings.json", "embeddings")

    def chunks(self) -> Iterator[tuple[Chunk, list[Record]]]:
        """Read the files, one chunk after the other; a chunk is of one file.

        Raises:
            FileNotFoundError: If a file is not there.
            ValueError: As in `TextFile.records`.
        """
        number = 0
        for file_number, file in enumerate(self.files):
            records, start, row = file.records(may_be_empty=True), 0, 0
            while gathered := list(islice(records, self.chunk_texts)):
                yield Chunk(number, file_number, start, row, len(gathered), _digest(gathered)), gathered
                number, start, row = number + 1, gathered[-1].end, row + len(gathered)

    def read(self, chunk: Chunk) -> list[Record]:
        """The texts of a chunk, read where they are.

        Raises:
            OSError: If they are not those that the chunk was made of.
        """
        file = self.files[chunk.file]
        records = list(islice(file.records(chunk.start), chunk.texts))
        if _digest(records) != chunk.digest:
            raise OSError(f"{file.path} is not the file that was read before; every worker must see the same files")
        return records

    def part(self, chunk: Chunk) -> Path:
        """Where the embeddings of a chunk go."""
        return self.output / f"part-{chunk.number:06d}.parquet"

    def is_done(self, chunk: Chunk) -> bool:
        """Whether the part of a chunk is there.

        Raises:
            OSError: If it is damaged.
            ValueError: If it is of other texts.
        """
        path = self.part(chunk)
        if not path.exists():
            return False
        try:
            metadata = parquet.read_metadata(path)
            digest = (metadata.metadata or {}).get(b"texts", b"").decode()
        except (arrow.ArrowException, OSError) as error:
            raise OSError(f"{path} is damaged ({error}); delete it and run again") from error
        if digest != chunk.digest or metadata.num_rows != chunk.texts:
            raise ValueError(f"{path} has other texts than {self.files[chunk.file].path}; delete it to embed them anew")
        return True

    def write(self, chunk: Chunk, records: Sequence[Record], embeddings: NDArray[np.float32]) -> None:
        """Write a part, whole or not at all.

        Half a surrogate pair, which no file can hold as UTF-8, is written as U+FFFD, as which the model saw it.

        Shapes:
            embeddings: (n, m)
        """
        name = self.files[chunk.file].path.name
        columns: dict[str, Any] = {
            "file": arrow.array([name] * len(records)).dictionary_encode(),
            "row": arrow.array(range(chunk.row, chunk.row + len(records)), arrow.int64()),
        }
        if self.files[chunk.file].id_column is not None:
            columns["id"] = [record.id for record in records]
        if self.keep_texts:
            columns["text"] = [valid_unicode(record.text) for record in records]
        columns["embedding"] = embedding_column(embeddings)
        table = arrow.table(columns).replace_schema_metadata({"texts": chunk.digest})
        write_parquet(self.part(chunk), table)


class ChunkEmbedder:
    """Does chunks of a job with one model: the callable that a loop or a cluster engine hands them to."""

    def __init__(self, job: BulkJob, model: SentenceTransformer, batch_tokens: int | None = None) -> None:
        """Keep job and model."""
        self.job = job
        self.embed = TextEmbedder(model, batch_tokens=batch_tokens, prompt=job.prompt, prompt_name=job.prompt_name)

    def __call__(self, chunk: Chunk, records: Sequence[Record] | None = None) -> int:
        """Embed a chunk and write its part, if it is not there; returns the number of texts embedded."""
        if self.job.is_done(chunk):
            return 0
        records = self.job.read(chunk) if records is None else records
        self.job.write(chunk, records, self.embed([record.text for record in records]))
        return len(records)


@dataclass(frozen=True)
class BulkResult:
    """What a run did.

    Attributes:
        texts: Texts of this share.
        embedded: Those that were embedded now; the others were there.
        tokens: Tokens run now.
        parts: Parts of this share.
        seconds: Wall time.
    """

    texts: int
    embedded: int
    tokens: int
    parts: int
    seconds: float


def embed_files(
    job: BulkJob,
    model: SentenceTransformer,
    *,
    shard: int = 0,
    num_shards: int = 1,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
) -> BulkResult:
    """Do a share of a job in this process; what is there already is not done again.

    Args:
        job: What to do.
        model: The model.
        shard: Which share, counted from 0: the parts whose number leaves this rest.
        num_shards: How many shares; each may run anywhere, in any order, and again.
        batch_tokens: Padded tokens in a batch; see `BatchRunner`.
        progress: Called after each part.

    Raises:
        ValueError: If the share is none, or the output folder is for something else.
        OSError: If a part is damaged.
    """
    share_of(shard, num_shards)
    started = time.perf_counter()
    job.claim(model)
    do = ChunkEmbedder(job, model, batch_tokens)
    texts = embedded = parts = 0
    for chunk, records in job.chunks():
        if chunk.number % num_shards == shard:
            embedded += do(chunk, records)
            texts, parts = texts + chunk.texts, parts + 1
            if progress is not None:
                progress(texts, do.embed.runner.tokens)
    return BulkResult(texts, embedded, do.embed.runner.tokens, parts, time.perf_counter() - started)


def share_of(shard: int | None, num_shards: int | None, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Which share of how many this process does; what is not given is read from the environment.

    RANK of WORLD_SIZE (torchrun and others), SLURM_ARRAY_TASK_ID of SLURM_ARRAY_TASK_COUNT, or both, where each task of
    an array starts several ranks. Nothing of all that is 0 of 1.

    Raises:
        ValueError: If only one of two numbers is there, or there is no such share.
    """
    if (shard is None) != (num_shards is None):
        raise ValueError(f"shard is {shard} and num_shards {num_shards}; give both or none")
    if shard is None or num_shards is None:
        shard, num_shards = 0, 1
        for index, first, step, count in (
            ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_STEP", "SLURM_ARRAY_TASK_COUNT"),
            ("RANK", "", "", "WORLD_SIZE"),
        ):
            if (index in environment) != (count in environment):
                raise ValueError(f"of {index} and {count} only one is set; set both, or give shard and num_shards")
            if index in environment:
                number = (int(environment[index]) - int(environment.get(first, 0))) // int(environment.get(step, 1))
                shard, num_shards = shard * int(environment[count]) + number, num_shards * int(environment[count])
    if not 0 <= shard < num_shards:
        raise ValueError(f"shard is {shard} of {num_shards}; allowed are 0 to num_shards - 1")
    return shard, num_shards


def find_files(places: Sequence[Path]) -> list[Path]:
    """The files among some paths, and in the folders among them, in order.

    Raises:
        FileNotFoundError: If a path is not there, or a folder has no file that can be read.
        ValueError: If a file ends in something else, or two have the same name, by which the output tells them apart.
    """
    found: list[Path] = []
    for place in places:
        if not place.is_dir() and place.suffix.lower() not in SUFFIXES:
            raise ValueError(f"{place} ends in {place.suffix!r}; allowed are {', '.join(SUFFIXES)} and folders of them")
        if not place.exists():
            raise FileNotFoundError(f"there is no file {place}")
        inside = sorted(path for path in place.iterdir() if path.suffix.lower() in SUFFIXES) if place.is_dir() else []
        if place.is_dir() and not inside:
            raise FileNotFoundError(f"the folder {place} has no file that ends in {', '.join(SUFFIXES)}")
        found += inside or [place]
    names = [path.name for path in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"several files have the name {', '.join(twice)}; the output tells files apart by it")
    return found


def write_embeddings(path: Path, texts: Sequence[str], embeddings: NDArray[np.float32]) -> None:
    """Write embeddings as .npy (n, m) float32, or as .parquet with the columns text and embedding; whole or not at all.

    Half a surrogate pair, which no file can hold as UTF-8, is written as U+FFFD, as which the model saw it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npy":
        buffer = io.BytesIO()
        np.save(buffer, embeddings)
        write_atomically(path, buffer.getvalue())
    else:
        columns = {"text": list(map(valid_unicode, texts)), "embedding": embedding_column(embeddings)}
        write_parquet(path, arrow.table(columns))


def embedding_column(embeddings: NDArray[np.float32]) -> Any:
    """(n, m) as a column of lists of fixed size."""
    flat = np.ascontiguousarray(embeddings, np.float32).reshape(-1)
    return arrow.FixedSizeListArray.from_arrays(flat, embeddings.shape[1])


def write_parquet(path: Path, table: Any) -> None:
    """Write a table, whole or not at all."""
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, compression="zstd", write_page_checksum=True)
    write_atomically(path, buffer.getvalue())


def _digest(records: Sequence[Record]) -> str:
    digest = hashlib.sha256()
    for record in records:
        text = record.text.encode("utf-8", "surrogatepass")
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()[:32]
