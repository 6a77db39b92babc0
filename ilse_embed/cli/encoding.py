"""``ilse encode``."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ilse_embed.cli.options import (
    AddressOption,
    BackboneDtypeOption,
    BatchTokensOption,
    EngineOption,
    JsonOption,
    MovedBackboneOption,
    PromptOption,
    WorkersOption,
    backbone_path,
    cluster_of,
)
from ilse_embed.cli.screen import TokenProgress, console, plain, quiet, write_report


def encode(
    model: Annotated[str, typer.Argument(help="Folder or hub name of a saved model.")],
    files: Annotated[
        list[Path],
        typer.Argument(help="Texts: .txt (a text a line), .jsonl, .csv, .tsv or .parquet; or folders of them."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="A folder for Parquet parts: any number of texts, goes on after a crash. Or one .parquet or .npy "
            "file; beside FILE if not set."
        ),
    ] = None,
    column: Annotated[str | None, typer.Option(help='Column of the texts; by default "text", or the only one.')] = None,
    id_column: Annotated[str | None, typer.Option(help="Column of identifiers to keep.")] = None,
    keep_texts: Annotated[bool, typer.Option(help="Write the texts beside their embeddings.")] = True,
    prompt: PromptOption = None,
    prompt_name: Annotated[str | None, typer.Option(help="A prompt of the model, by name.")] = None,
    backbone: MovedBackboneOption = None,
    backbone_dtype: BackboneDtypeOption = None,
    batch_tokens: BatchTokensOption = None,
    chunk_texts: Annotated[int, typer.Option(help="Texts in a part.", min=1)] = 8192,
    shard: Annotated[
        int | None,
        typer.Option(help="Which share; by default from RANK or SLURM_ARRAY_TASK_ID.", rich_help_panel="Cluster"),
    ] = None,
    num_shards: Annotated[
        int | None,
        typer.Option(help="How many; by default WORLD_SIZE or SLURM_ARRAY_TASK_COUNT.", rich_help_panel="Cluster"),
    ] = None,
    engine: EngineOption = "local",
    address: AddressOption = None,
    workers: WorkersOption = None,
    json_file: JsonOption = None,
) -> None:
    """Embed the texts of files."""
    quiet()
    cluster = cluster_of(engine, address, workers)
    from ilse_embed.bulk import BulkJob, embed_files, find_files, share_of, write_embeddings
    from ilse_embed.embedding import TextEmbedder
    from ilse_embed.extraction import default_device
    from ilse_embed.model import load
    from ilse_embed.store import dtype_of
    from ilse_embed.tables import SUFFIXES, TextFile, read_texts

    paths = find_files(files)
    if output is None and paths != files[:1]:
        raise ValueError("--output is missing; without it one file is embedded, into a file beside it")
    target = output or paths[0].with_suffix(".embeddings.parquet")
    share = share_of(shard, num_shards)
    moved = None if backbone is None else backbone_path(backbone)
    # On Ray the GPU of this machine is for a worker.
    where: dict[str, Any] = {"device": default_device() if cluster is None else "cpu"}
    where |= {"model_kwargs": {} if backbone_dtype is None else {"dtype": dtype_of(backbone_dtype)}}
    if target.suffix.lower() in (".npy", *SUFFIXES):
        if cluster is not None or share != (0, 1):
            raise ValueError(f"--output is {target}, one file; several processes need a folder")
        if id_column is not None or not keep_texts:
            raise ValueError(f"--output is {target}, one file of texts and embeddings; other columns need a folder")
        if target.suffix not in (".parquet", ".npy"):
            raise ValueError(f"--output is {target}; allowed are a folder, or a name that ends in .parquet or .npy")
        if any(target.exists() and target.samefile(path) for path in paths):
            raise ValueError(f"--output is {target}, a file of the texts itself; take another name")
        texts = [text for path in paths for text in read_texts(path, column)]
        embed = TextEmbedder(
            load(model, moved, **where), batch_tokens=batch_tokens, prompt=prompt, prompt_name=prompt_name
        )
        with TokenProgress("Embedding", "texts") as update:
            embeddings = embed(texts, lambda done: update(done, len(texts), embed.runner.tokens))
        write_embeddings(target, texts, embeddings)
        console.print(
            f"{len(texts)} texts -> {plain(str(target))} (width {embeddings.shape[1]})", highlight=False, soft_wrap=True
        )
        return write_report(json_file, {"texts": len(texts), "tokens": embed.runner.tokens})
    if cluster is not None and share != (0, 1):
        raise ValueError(
            f"the share is {share[0]} of {share[1]}, but --engine ray divides the work itself; leave it out"
        )
    job = BulkJob(
        tuple(TextFile(path, column, id_column) for path in paths),
        target,
        chunk_texts=chunk_texts,
        keep_texts=keep_texts,
        prompt=prompt,
        prompt_name=prompt_name,
    )
    loaded = load(model, moved, **where)
    with TokenProgress("Embedding", "texts") as update:

        def tell(done: int, tokens: int) -> None:
            update(done, None, tokens)

        options: dict[str, Any] = {"batch_tokens": batch_tokens, "progress": tell}
        if cluster is not None:
            from ilse_embed.distributed import embed_files_on

            job.claim(loaded)
            llm: Any = loaded[0].model
            result = embed_files_on(cluster, job, model, moved, dtype=llm.dtype, **options)
        else:
            result = embed_files(job, loaded, shard=share[0], num_shards=share[1], **options)
    console.print(
        f"{result.texts:,} texts in {result.parts} parts, {result.embedded:,} embedded now -> {plain(str(target))}",
        highlight=False,
        soft_wrap=True,
    )
    return write_report(json_file, asdict(result))
