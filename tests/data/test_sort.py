"""The memory that sorting takes, and the errors of the engine."""

import errno
from dataclasses import replace

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from jfi.data import DataConfig, DataError, load_dataset
from jfi.data.prepared.prepare import prepare_dataset
from jfi.data.prepared.scoring import ScoringRows, Sources
from jfi.data.prepared.stages import sort as external_sort
from jfi.data.prepared.stages.sort import MemoryLimitError, free_memory, sort_batches

GIB = 1 << 30
BATCHES = [pa.RecordBatch.from_pydict({"x": np.arange(1 << 18)[::-1].copy()})] * 4


def machine(root, groups: str, free: int, files: dict[str, str]):
    """Writes what a Linux machine says of its memory and of the control groups of this process."""
    for name, text in ({"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable:   {free >> 10} kB\n"} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_text(groups)
    return root


def test_this_machine_has_free_memory():
    assert 0 < free_memory() < 1 << 50


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {}, 8 * GIB),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/memory.max": "max\n", "sys/fs/cgroup/a/b/memory.current": "7\n"}, 8 * GIB),
        # The limit of the folder above; pages of files can be dropped.
        (
            "0::/a/b\n",
            {
                "sys/fs/cgroup/a/memory.max": f"{3 * GIB}\n",
                "sys/fs/cgroup/a/memory.current": f"{2 * GIB}\n",
                "sys/fs/cgroup/a/memory.stat": f"anon 7\ninactive_file {GIB // 2}\n",
            },
            3 * GIB // 2,
        ),
        # In a container the group of the path is the top folder.
        (
            "11:cpu:/x\n5:memory:/docker/x\n",
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
                "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 5\n",
            },
            GIB + 5,
        ),
        (
            "0::/\n",
            {
                "sys/fs/cgroup/memory.max": "100\n",
                "sys/fs/cgroup/memory.current": "200\n",
                "sys/fs/cgroup/memory.stat": "",
            },
            0,
        ),
    ],
)
def test_free_memory_is_that_of_the_control_group_too(tmp_path, groups, files, expected):
    assert free_memory(machine(tmp_path, groups, 8 * GIB, files)) == expected


def test_sorting_takes_half_of_what_is_free(tmp_path, monkeypatch):
    limits, connect = [], external_sort._connect
    monkeypatch.setattr(external_sort, "_connect", lambda one: limits.append(one["memory_limit"]) or connect(one))
    for free, memory in [(6 * GIB, None), (0, None), (0, "1GB")]:
        monkeypatch.setattr(external_sort, "free_memory", lambda free=free: free)
        rows = [x for batch in sort_batches(BATCHES, ["x"], memory, tmp_path) for x in batch.column(0).to_numpy()]
        assert rows == [x for x in range(1 << 18) for _ in BATCHES]
    assert limits == ["3072MiB", "256MiB", "1GB"]


def test_whatever_prepares_sorts_in_the_memory_that_is_given(tmp_path, monkeypatch):
    given, sort = [], external_sort.sort_batches
    monkeypatch.setattr(external_sort, "sort_batches", lambda *one: given.append(one[2]) or sort(*one))
    rows = {"user_id": [1, 2] * 20, "item_id": [*range(10)] * 4, "timestamp": [*range(40)], "like": [1, 0] * 20}
    config = DataConfig(interactions=pa.table(rows), label="like")
    schema = load_dataset(config, memory="1GB").schema
    (tmp_path / "scored").mkdir()
    ScoringRows(Sources(pa.table(rows)), tmp_path / "scored", schema, replace(config, statistics=[]), memory="3GB")
    prepare_dataset(config, tmp_path / "prepared", "2GB", show=False)
    assert given == ["1GB", "1GB", "3GB", "2GB", "2GB"]
    with pytest.raises(DataError, match=r"^--memory many: not an amount of memory such as 1GB$"):
        load_dataset(config, memory="many")


@pytest.mark.parametrize(
    ("memory", "advice"),
    [("1MB", "1MB; name more by --memory"), (None, "1MiB, half of what is free here; free more, or give fewer rows")],
)
def test_too_little_memory_is_one_line_with_advice(tmp_path, monkeypatch, memory, advice):
    monkeypatch.setattr(external_sort, "free_memory", lambda: 0)
    monkeypatch.setattr(external_sort, "_MIN_MEMORY", 1 << 20)
    with pytest.raises(MemoryLimitError, match=rf"^sorting the table needs more memory than {advice}$"):
        list(sort_batches(BATCHES, ["x"], memory, tmp_path))


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (duckdb.IOException("Could not write file x: No space left on device"), errno.ENOSPC),
        (duckdb.IOException("Could not write file x: Read-only file system"), errno.EROFS),
        (duckdb.IOException("Could not read enough bytes from file x"), errno.EIO),
        (duckdb.OutOfMemoryException("adjust max_temp_directory_size"), errno.ENOSPC),
    ],
)
def test_only_a_full_disk_is_called_one(tmp_path, monkeypatch, error, number):
    class Connection:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        register = staticmethod(lambda *_: None)

        def sql(self, _):
            raise error

    monkeypatch.setattr(external_sort, "_connect", lambda _: Connection())
    with pytest.raises(OSError, match="sorting") as caught:
        list(sort_batches(BATCHES, ["x"], None, tmp_path))
    assert caught.value.errno == number
