"""Time of reading a request: from the bytes of its JSON to ids and numbers, without a model.

python -m benchmarks.reading
PYTHONPATH=OTHER python benchmarks/reading.py --forms rows      the code of another checkout, on the same requests

Medians of the process's CPU time in ms, with 1,000,000 items. *texts* and *integers* are how ids are written, *escapes*
is texts of which each has an escape, and *lists* has a field of events with lists of two texts. Bodies go round, and so
do the cases: what is looked up for one is out of the caches for the next.
"""

import argparse
import itertools
import json
import random
import sys
import time
from statistics import median

from jfi.serving.requests import RequestReader
from jfi.serving.schema import Field, Limits, Schema

SIZES = {"item": 1_000_000, "category": 1000, "rating": 6}
SHAPES = ((200, 100), (2000, 1000), (20000, 500))
KINDS = ("texts", "integers", "escapes", "lists")
BODIES = 16


def reader_of(kind: str) -> RequestReader:
    candidate = [Field(name, "category", [name]) for name in ("item", "category")]
    event = [Field(name, "category", [f"history_{name}"]) for name in SIZES] + [Field("age", "age", num_buckets=32)]
    vocabularies = {name: [value(kind, i) for i in range(1, size)] for name, size in SIZES.items()}
    if kind == "lists":
        event.append(Field("tags", "slots", ["history_tags_0", "history_tags_1"]))
        vocabularies["tags"] = vocabularies["category"]
    return RequestReader(Schema([], candidate, event, vocabularies), Limits(1000, 20000))


def value(kind: str, i: int) -> str:
    return f"é{i}" if kind == "escapes" else str(i)


def make_body(kind: str, form: str, history: int, candidates: int, draw: random.Random) -> bytes:
    def ids(name: str, count: int) -> list:
        drawn = draw.choices(range(1, SIZES[name]), k=count)
        return drawn if kind == "integers" else [value(kind, i) for i in drawn]

    events = {name: ids(name, history) for name in SIZES} | {"age": draw.choices(range(10**6), k=history)}
    if kind == "lists":
        events["tags"] = [ids("category", 2) for _ in range(history)]
    parts = {"history": events, "candidates": {name: ids(name, candidates) for name in ("item", "category")}}
    if form == "rows":
        parts = {
            name: [dict(zip(part, row, strict=True)) for row in zip(*part.values(), strict=True)]
            for name, part in parts.items()
        }
    return json.dumps({"user": {}} | parts, separators=(",", ":")).encode()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", default=["columns", "rows"])
    parser.add_argument("--rounds", type=int, default=20)
    options, draw = parser.parse_args(), random.Random(0)
    readers = {kind: reader_of(kind) for kind in KINDS}
    cases = {
        (shape, kind, form): [make_body(kind, form, *shape, draw) for _ in range(BODIES)]
        for shape, kind, form in itertools.product(SHAPES, KINDS, options.forms)
    }
    times = {case: [] for case in cases}
    for round_ in range(-1, options.rounds):
        for (shape, kind, form), bodies in cases.items():
            for i in range(max(1, 6000 // sum(shape))):
                start = time.process_time()
                readers[kind].read(bodies[(i + round_) % BODIES])
                if round_ >= 0:  # the first round warms up
                    times[shape, kind, form].append(1e3 * (time.process_time() - start))
    print(f"{'events + candidates':24s}" + "".join(f"{kind:>10s}" for kind in KINDS))
    for shape, form in itertools.product(SHAPES, options.forms):
        medians = "".join(f"{median(times[shape, kind, form]):10.3f}" for kind in KINDS)
        print(f"{f'{shape[0]:,} + {shape[1]:,} by {form}':24s}{medians}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
