"""Bytes and seconds of a published version of a model that trains, against the whole artifact.

python -m benchmarks.publish

A SequenceDLRM with a table of 1,000,000 x 64 on a CPU, exported once. Before each delta 1 % of the rows are marked as
stepped and get other values. Written is from the marks to the folder flushed to the disk; read is what a server does
beside its answers, verify and check every number; applied is the time between two calls of the model. In a table that
grows the raw ids of a delta's rows are sorted beside answers, too, unless none has moved. Results go to
`benchmarks/results/cpu/publish.json`.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torchrec import EmbeddingConfig

from benchmarks import report
from benchmarks.run import Rates
from benchmarks.serving import ROOT
from jfi import FusedEmbeddingCollection, SequenceFeatureConfig
from jfi.models import AttentionPooling, SequenceDLRM
from jfi.serving.export import Export
from jfi.serving.publish import Publisher
from jfi.serving.published import path_of
from jfi.serving.schema import Field, Limits, Schema
from jfi.serving.scorer import Scorer
from jfi.serving.tables import RowsOfIds
from jfi.serving.version_chain import VersionChain

WIDTH, CHANGED = 64, 0.01


def make_model(rows: int) -> SequenceDLRM:
    keys = ["item", "history_item"]
    items = EmbeddingConfig(name="item", embedding_dim=WIDTH, num_embeddings=rows, feature_names=keys)
    return SequenceDLRM(
        None,
        FusedEmbeddingCollection([items], torch.optim.Adagrad, {"lr": 0.05}),
        [SequenceFeatureConfig("taste", sequence_keys=["history_item"], target_keys=["item"])],
        dense_in_features=1,
        dense_arch_layer_sizes=[64, WIDTH],
        over_arch_layer_sizes=[128, 1],
        pooling=AttentionPooling(num_heads=2),
    )


def size(path: Path) -> int:
    return sum(one.stat().st_size for one in path.rglob("*") if one.is_file())


def raw_ids(rows: int) -> Iterator[dict]:
    """Seconds of the raw ids of a delta to a table that grows, of which none or some have moved."""
    table, changed = RowsOfIds(torch.randperm(rows)), torch.randperm(rows)[: int(rows * CHANGED)]
    for moved in (0, 100):
        ids, seconds = table.ids[changed], []
        ids[:moved] += rows
        for _ in range(9):
            begin = time.perf_counter()
            table.changed(changed, ids)
            seconds.append(time.perf_counter() - begin)
        yield {"case": f"raw ids of a delta, {moved} moved", "read_s": statistics.median(seconds)}


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.publish", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--deltas", type=int, default=7)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/cpu")
    parser.add_argument("--commit", help="to record where the checkout is no git repository")
    options = parser.parse_args()
    torch.manual_seed(0)
    model, schema = (
        make_model(options.rows),
        Schema(
            [],
            [Field("item", "category", ["item"])],
            [Field("item", "category", ["history_item"])],
            {"item": [str(one) for one in range(options.rows - 1)]},
        ),
    )
    collection = model.embedding_collection
    weight, rows = collection.embeddings["item"].weight, []
    with tempfile.TemporaryDirectory() as name:
        folder, seconds = Path(name) / "versions", {"write_s": [], "read_s": [], "apply_s": []}
        publisher = Publisher(folder, Export(model, schema, Limits(1000, 200)))
        begin = time.perf_counter()
        publisher.publish()
        whole = {"write_s": time.perf_counter() - begin, "bytes": size(path_of(folder, 1))}
        chain = VersionChain(folder, Scorer)
        scorer = chain.start()
        for _ in range(options.deltas):
            changed = torch.randperm(options.rows)[: int(options.rows * CHANGED)]
            with torch.no_grad():
                weight[changed] += 0.01
            collection.fused_optimizer.changed.mark({"item": options.rows}, changed)
            times = [time.perf_counter()]
            number = publisher.publish()
            times.append(time.perf_counter())
            step = chain.next()
            times.append(time.perf_counter())
            scorer = step.apply_to(scorer)
            times.append(time.perf_counter())
            chain.done(step)
            for found, one, other in zip(seconds.values(), times[:-1], times[1:], strict=True):
                found.append(other - one)
        medians = {of: statistics.median(found) for of, found in seconds.items()}
        delta = size(path_of(folder, number))
        begin = time.perf_counter()
        number = publisher.publish(whole=True)
        snapshot = {"write_s": time.perf_counter() - begin, "bytes": size(path_of(folder, number))}
    rows = [
        {"case": "artifact, compiled", **whole},
        {"case": f"delta of {CHANGED:.0%} of {options.rows} rows x {WIDTH}", **medians, "bytes": delta},
        {"case": "snapshot", **snapshot},
        *raw_ids(options.rows),
    ]
    where = report.environment(torch.device("cpu"), Rates(), options.commit)
    report.write(options.out, "publish", where, [{"suite": "publish", **row} for row in rows])
    for row in rows:
        print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
