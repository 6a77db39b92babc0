"""``ilse extract``."""

import time
from pathlib import Path
from typing import Annotated

import typer

from ilse_embed.cli.options import (
    BACKBONE_HELP,
    STORE_DTYPE,
    AddressOption,
    BackboneDtypeOption,
    BatchTokensOption,
    CompressOption,
    DataDirOption,
    EngineOption,
    JsonOption,
    PromptOption,
    StoreDtypeOption,
    WorkersOption,
    backbone_path,
    cluster_of,
)
from ilse_embed.cli.screen import TokenProgress, console, plain, quiet, say, write_report


def extract(
    backbone: Annotated[str, typer.Argument(help=BACKBONE_HELP)],
    sources: Annotated[
        list[str], typer.Argument(help="Files (.txt, .jsonl, .csv, .tsv, .parquet) and names of mteb tasks.")
    ],
    output: Annotated[Path, typer.Option(help="Folder of feature stores, as --store of ilse train takes it.")],
    column: Annotated[
        list[str] | None, typer.Option(help='Column of texts in files, again for more; by default "text", or the only.')
    ] = None,
    data_dir: DataDirOption = None,
    pooling: Annotated[str, typer.Option(help="mean, mean_without_first, mean_after_bos or sink_aware.")] = "mean",
    max_seq_length: Annotated[
        int | None, typer.Option(help="Longest text in tokens; by default the model's, at most 2048.")
    ] = None,
    prompt: PromptOption = None,
    store_dtype: StoreDtypeOption = None,
    backbone_dtype: BackboneDtypeOption = None,
    compress: CompressOption = None,
    batch_tokens: BatchTokensOption = None,
    dry_run: Annotated[bool, typer.Option(help="Only tell how much there is to do.")] = False,
    engine: EngineOption = "local",
    address: AddressOption = None,
    workers: WorkersOption = None,
    json_file: JsonOption = None,
) -> None:
    """Run a backbone over texts once and keep its layers; run again after a crash, it goes on where it was."""
    quiet()
    cluster = cluster_of(engine, address, workers)
    from ilse_embed.extraction import BackboneSource, Plan, fill
    from ilse_embed.store import FeatureStore
    from ilse_embed.tables import SUFFIXES, read_texts
    from ilse_embed.tasks import load_task

    texts: dict[str, None] = {}
    for name in sources:
        if Path(name).suffix.lower() in SUFFIXES or Path(name).is_file():
            for one in column or [None]:  # type: ignore[list-item]
                texts |= dict.fromkeys(read_texts(name, one))
        else:
            texts |= dict.fromkeys(load_task(name, data_dir).texts())
    source = BackboneSource(backbone_path(backbone), pooling, max_seq_length, backbone_dtype)
    model = source.load(None if cluster is None else "cpu")  # the GPU of this machine is for a worker
    store = FeatureStore.for_backbone(output, model, dtype=store_dtype or STORE_DTYPE, prompt=prompt, compress=compress)
    plan = Plan.of(model, texts, store)
    say(
        f"{plan.texts:,} distinct texts, {len(plan.missing):,} to extract: {plan.tokens:,} tokens, "
        f"{plan.bytes / 1e9:.3f} GB on disk ({plan.free / 1e9:.1f} GB free)"
    )
    report = {"store": str(store.folder.name), "texts": plan.texts, "missing": len(plan.missing), "bytes": plan.bytes}
    if dry_run:
        say("Nothing was extracted (--dry-run).")
        return write_report(json_file, report | {"tokens": plan.tokens})
    plan.check()
    started = time.perf_counter()
    with TokenProgress("Extracting", "texts") as update:
        if cluster is not None:
            from ilse_embed.distributed import fill_on

            fill_on(cluster, source, store, model, plan.missing, batch_tokens=batch_tokens, progress=update)
        else:
            fill(store, model, plan.missing, batch_tokens=batch_tokens, progress=update)
    seconds = time.perf_counter() - started
    console.print(
        f"{len(plan.missing):,} texts in {seconds:.1f} s ({plan.tokens / max(seconds, 1e-9):,.0f} tokens/s): "
        f"{plain(str(store.folder))}",
        highlight=False,
        soft_wrap=True,
    )
    return write_report(json_file, report | {"tokens": plan.tokens, "seconds": seconds})
