"""Damaged files: the outcome is a dataset or one line that names the file, and values are never changed in silence."""

import signal
import zlib
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
from data.mutations import COLUMNS, FILES, harmful, harmless, read_again
from data_configs import data_config, read_blocks

from jfi.data import DataError, load_dataset
from jfi.data.io.blocks import read_table

SECONDS = 20


@contextmanager
def limit(seconds: int):
    """Ends what takes more CPU time: a busy machine is no fault."""

    def stop(number, frame):
        raise TimeoutError(f"more than {seconds} s of CPU time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def batch(path: str) -> list:
    config = data_config(interactions=path, label="rating >= 4", event_categorical=["rating"])
    batch = load_dataset(config).batches("train", batch_size=64, seed=0, epoch=0)[0]
    features = batch.sparse_features
    return [features.keys(), features.values().tolist(), features.lengths().tolist(), batch.labels.tolist()]


def outcome(folder, name: str, edit, seed: int) -> str:
    """Damages the file by an edit, and gives "read" or "refused" after all checks."""
    random = np.random.default_rng(seed)
    content = edit(FILES[name], random)
    path = folder / name
    path.write_bytes(content)
    with limit(SECONDS):
        try:
            table = read_table(str(path), COLUMNS)
            values = {column: table.strings(column).to_pylist() for column in COLUMNS}
        except DataError as error:
            check_message(str(error), name)
            return "refused"
        if name != "r.parquet" and table.name == str(path):
            check_values(name, content, values)
        try:
            batch(str(path))
        except DataError as error:
            check_message(str(error), name)
            return "refused"
    return "read"


def check_message(message: str, name: str) -> None:
    assert "\n" not in message
    assert len(message) < 2100
    # Those of the splits are about all files.
    assert f"/{name}" in message or message.startswith(("the ", "label ")), message


def check_values(name: str, content: bytes, values: dict) -> None:
    expected = read_again(name, content)
    if expected is None and name in ("ratings.dat", "u.data"):
        # MovieLens' layouts allow latin-1.
        expected = read_again(name, content.decode("latin-1").encode())
    assert expected is not None, "Python's own modules refuse this file"
    assert values == expected


def edits(kind) -> list[tuple[str, str]]:
    return [(name, edit) for name in FILES for edit in kind(name)]


@pytest.mark.parametrize(("name", "edit"), edits(harmful))
def test_damage_is_read_or_refused(tmp_path, name, edit):
    outcome(tmp_path, name, harmful(name)[edit], seed=zlib.crc32(f"{name} {edit}".encode()))


@pytest.mark.parametrize(("name", "edit"), edits(harmless))
def test_harmless_edits_change_nothing(tmp_path, name, edit):
    path = tmp_path / name
    path.write_bytes(FILES[name])
    expected = batch(str(path))
    path.write_bytes(harmless(name)[edit](FILES[name], np.random.default_rng(1)))
    assert batch(str(path)) == expected


@pytest.mark.slow
def test_much_damage_is_read_or_refused(tmp_path, record_property):
    counts = Counter()
    for name in FILES:
        for change in harmful(name).values():
            for seed in range(40 if name == "r.parquet" else 12):
                counts[name, outcome(tmp_path, name, change, seed)] += 1
    print(dict(counts))
    assert counts.total() >= 400
    record_property("cases", counts.total())


def read_in_parts(path: str, monkeypatch) -> dict[str, list]:
    """The columns as `read_blocks` gives them, in parts of some bytes and blocks of a few rows."""
    with monkeypatch.context() as patch:
        patch.setattr("jfi.data.io.text.PART", 50)
        patch.setattr("jfi.data.io.blocks.BLOCK", 7)
        tables = list(read_blocks(path, COLUMNS))
    return {column: [x for table in tables for x in table.strings(column).to_pylist()] for column in COLUMNS}


@pytest.mark.parametrize("seeds", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "edit"), [pair for pair in edits(harmful) if pair[0] != "r.parquet"])
def test_damaged_text_in_parts_is_read_as_the_whole_or_refused(
    tmp_path, monkeypatch, record_property, name, edit, seeds
):
    record_property("cases", seeds)
    for seed in range(seeds):
        random = np.random.default_rng([seed, zlib.crc32(f"{name} {edit}".encode())])
        path = tmp_path / name
        path.write_bytes(harmful(name)[edit](FILES[name], random))
        with limit(SECONDS):
            try:
                table = read_table(str(path), COLUMNS)
                if not len(table):
                    assert not any(map(len, read_blocks(str(path), COLUMNS)))
                    continue
                whole = {column: table.strings(column).to_pylist() for column in COLUMNS}
            except DataError as error:
                with pytest.raises(DataError) as caught:
                    read_in_parts(str(path), monkeypatch)
                assert str(caught.value) == str(error)
            else:
                assert read_in_parts(str(path), monkeypatch) == whole
