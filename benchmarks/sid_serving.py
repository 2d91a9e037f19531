"""A served request whose history is semantic IDs beside one whose history is item ids: time, memory, bytes.

Run as

    python -m benchmarks.sid_serving --out sid_serving.json

for histories of 2,000 and 20,000 events, on the GPU if there is one.

Two models without training, alike but for the item: *sid* reads 25 ternary digits of an event, and of a candidate; *id*
looks both up in a table of float32, or int8 with --tables. Each is exported for the longest history, then a request is
timed in this process (dense part, request to scores, reading of JSON) and over HTTP on loopback, one client and many.
"""

import argparse
import json
import random
import resource
import tempfile
import time
from pathlib import Path

import torch
from torchrec import EmbeddingCollection, EmbeddingConfig

from benchmarks.serving import BODIES, Shape, in_process, load, server
from jfi import SemanticIDEmbedding
from jfi.models import AttentionPooling, SequenceDLRM
from jfi.modules import KeyBias, SequenceFeatureConfig
from jfi.semantic_ids import DiscretePCA
from jfi.serving.export import Export
from jfi.serving.schema import Field, Limits, Schema
from jfi.serving.scorer import Scorer

DIGITS = 25


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--history", type=int, nargs="+", default=[2000, 20000])
    parser.add_argument("--candidates", type=int, default=500)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--tables", default="float32", help="of item ids: float32 or int8")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=2.5)
    parser.add_argument("--ways", nargs="+", default=["id", "sid"])
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def model_of(way: str, options: argparse.Namespace) -> tuple[SequenceDLRM, Schema, list]:
    """The model, its requests' schema, and the values that an item may have."""
    torch.manual_seed(0)
    sizes = [512, 256, options.width], [512, 256, 1]
    bias, age = KeyBias("history_age"), Field("age", "age", num_buckets=32)
    if way == "id":
        table = EmbeddingConfig(
            name="item",
            embedding_dim=options.width,
            num_embeddings=options.items,
            feature_names=["item", "history_item"],
        )
        taste = SequenceFeatureConfig("taste", ["history_item"], ["item"], bias=bias)
        collection = EmbeddingCollection(tables=[table])
        model = SequenceDLRM(None, collection, [taste], 1, *sizes, pooling=AttentionPooling(options.heads))
        values = [str(i) for i in range(1, options.items)]
        candidate, event = [Field("item", "category", ["item"])], [Field("item", "category", ["history_item"]), age]
        return model, Schema([], candidate, event, {"item": values}), values
    content = torch.randn(20_000, 32)
    codec = DiscretePCA(DIGITS).fit(content)
    semantic = SemanticIDEmbedding(codec, options.width, ["item_sid", "history_sid"])
    taste = SequenceFeatureConfig("taste", ["history_sid"], ["item_sid"], bias=bias)
    model = SequenceDLRM(None, None, [taste], 1, *sizes, pooling=AttentionPooling(options.heads), semantic_ids=semantic)
    layout = {"num_digits": DIGITS, "codebook_size": 0}
    candidate = [Field("sid", "sid", ["item_sid"], layout=layout)]
    event = [Field("sid", "sid", ["history_sid"], layout=layout), age]
    return model, Schema([], candidate, event, {}, codec=codec.fingerprint), codec.encode(content).tolist()


def body(schema: Schema, values: list, shape: Shape, draw: random.Random) -> bytes:
    name = schema.candidate[0].name
    request = {
        "user": {},
        "history": {
            name: draw.choices(values, k=shape.history),
            "age": [draw.randrange(10**6) for _ in range(shape.history)],
        },
        "candidates": {name: draw.choices(values, k=shape.candidates)},
    }
    request |= {} if schema.codec is None else {"codec": schema.codec}
    return json.dumps(request, separators=(",", ":")).encode()


def memory(device: torch.device) -> float:
    """MB in use: of the GPU as the driver counts them, else this process's peak."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def peak(scorer: Scorer, body: bytes) -> float | None:
    """MB of the GPU that a request takes beside what is loaded."""
    if scorer.device.type != "cuda":
        return None
    request, held = scorer.reader.read(body), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    scorer.score([request])
    return (torch.cuda.max_memory_allocated() - held) / 1e6


def main() -> None:
    options, rows = arguments(), []

    def add(row: dict) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)

    shapes = [Shape(history, options.candidates) for history in options.history]
    longest = Limits(options.candidates, max(options.history))
    for way in options.ways:
        with tempfile.TemporaryDirectory() as folder:
            model, schema, values = model_of(way, options)
            path, start = Path(folder) / "artifact", time.perf_counter()
            Export(model, schema, longest, device=options.device, tables=options.tables).write(path)
            exported = time.perf_counter() - start
            del model
            megabytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 1e6
            before = memory(torch.device(options.device))
            scorer = Scorer(path, None, longest.max_candidates, longest.max_history)
            common = {"way": way, "device": str(scorer.device), "export_s": exported, "artifact_mb": megabytes}
            common["loaded_mb"] = memory(scorer.device) - before
            draw = random.Random(0)
            bodies = {shape: [body(schema, values, shape, draw) for _ in range(BODIES)] for shape in shapes}
            for shape in shapes:
                size = sum(map(len, bodies[shape])) / BODIES
                more = {"request_kb": size / 1e3, "peak_mb": peak(scorer, bodies[shape][0])}
                measured = in_process(scorer, shape, bodies[shape], options.seconds)
                for row in measured:
                    add({**common, **more, **row})
            limits = ["--max-candidates", longest.max_candidates, "--max-history", longest.max_history]
            with server(path, *limits, "--queue", 2 * options.clients) as address:
                for shape in shapes:
                    for clients in (1, options.clients):
                        found = load(address, bodies[shape], clients, options.seconds)
                        size = sum(map(len, bodies[shape])) / BODIES
                        add({**common, "case": shape.name, "measured": "HTTP", "request_kb": size / 1e3, **found})
            del scorer
            if options.device == "cuda":
                torch.cuda.empty_cache()
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
