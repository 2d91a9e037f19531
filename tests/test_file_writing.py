"""Files that are whole or absent, and checksums that see every flipped bit."""

import os
import shutil
import subprocess
import sys

import pytest

from jfi.utils.files import (
    SUMS,
    DamagedFileError,
    check_sum,
    read_sums,
    sha256_of,
    temporary_folder,
    write_file,
    write_sums,
    writing_file,
    writing_folder,
)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "result"
    write_file(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_file(path, "new")
    assert caught.value.filename == str(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_in_the_place_of_an_unfinished_file_is_not_followed(tmp_path):
    """A folder of somebody else may hold one."""
    (tmp_path / "victim").write_text("as it was")
    (tmp_path / ".config.yaml.unfinished").symlink_to(tmp_path / "victim")
    (tmp_path / ".config.yaml.unfinished-x").symlink_to(tmp_path)
    write_file(tmp_path / "config.yaml", "new")
    assert (tmp_path / "victim").read_text() == "as it was"
    assert not (tmp_path / "config.yaml").is_symlink() and (tmp_path / "config.yaml").read_text() == "new"


def test_a_file_is_flushed_before_it_gets_its_name_and_its_folder_after(tmp_path, monkeypatch):
    order, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda fd: (order.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd))
    )
    monkeypatch.setattr(os, "replace", lambda *names: (order.append("replace"), replace(*names)))
    write_file(tmp_path / "result", b"bytes")
    assert order == ["result", "replace", tmp_path.name]


def test_a_folder_is_written_by_one_process_at_a_time(tmp_path):
    with writing_folder(tmp_path / "result") as unfinished:
        (unfinished / "file").touch()
        with pytest.raises(OSError, match="another process is writing it"), writing_folder(tmp_path / "result"):
            pass
    assert [path.name for path in tmp_path.rglob("*")] == ["result", "file"]


def test_the_folder_of_a_killed_process_is_removed_with_the_next_one(tmp_path):
    code = "from jfi.utils.files import temporary_folder; from pathlib import Path; import os, sys\n"
    code += "with temporary_folder('.x-', Path(sys.argv[1])) as folder: (folder / 'file').touch(); input()"
    killed = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE)
    while not list(tmp_path.glob(".x-*/files/file")):
        assert killed.poll() is None
    (left,) = tmp_path.iterdir()
    (tmp_path / ".x-file").touch()
    (tmp_path / ".x-own").mkdir()
    (tmp_path / ".x-own" / "thesis.txt").write_text("my own")
    shutil.copytree(left, tmp_path / ".x-other", ignore=lambda folder, names: {"files"})
    (tmp_path / ".x-other" / ".jfi-writer").write_text("another machine, whose locks are not seen here")
    kept = {tmp_path / ".x-file", tmp_path / ".x-own", tmp_path / ".x-other"}
    with temporary_folder(".x-", tmp_path) as folder:
        assert set(tmp_path.iterdir()) == {left, folder.parent, *kept}  # a process that lives keeps its own
    killed.kill()
    killed.communicate()
    with temporary_folder(".x-", tmp_path) as folder:
        assert set(tmp_path.iterdir()) == {folder.parent, *kept}
    assert set(tmp_path.iterdir()) == kept and (tmp_path / ".x-own" / "thesis.txt").exists()


def test_each_of_two_writers_of_a_file_publishes_what_it_has_written_itself(tmp_path):
    path, other = tmp_path / "result", "y" * 1000
    with writing_file(path) as first:
        first.write_text("x" * 10)
        with writing_file(path) as second:
            second.write_text(other[:500])
            assert not path.exists()
        assert path.read_text() == other[:500]
    assert path.read_text() == "x" * 10
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def folder(tmp_path):
    for name in ("a.bin", "b.json"):
        (tmp_path / name).write_text(name)
    write_sums(tmp_path, {name: sha256_of(tmp_path / name) for name in ("a.bin", "b.json")})
    return tmp_path


def test_sha256sum_reads_the_sums(folder):
    done = subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "a.bin: OK\nb.json: OK\n"), done.stderr


def test_a_flipped_bit_of_any_byte_is_seen(folder):
    def verify() -> None:
        sums = read_sums(folder)
        for name in ("a.bin", "b.json"):
            check_sum(folder, name, sums)

    verify()
    for path in folder.iterdir():
        content = path.read_bytes()
        for byte in range(len(content)):
            flipped = bytearray(content)
            flipped[byte] ^= 1 << byte % 8
            path.write_bytes(flipped)
            with pytest.raises(DamagedFileError, match=path.name):
                verify()
        path.write_bytes(content)
    verify()


@pytest.mark.parametrize("name", ["../a.bin", "/etc/passwd", "", ".", "a b"])
def test_sums_of_other_folders_files_are_refused(folder, name):
    write_sums(folder, {name: "0" * 64})
    with pytest.raises(DamagedFileError, match="SHA256SUMS is damaged"):
        read_sums(folder)


def test_what_is_missing_is_named(folder):
    sums = read_sums(folder)
    with pytest.raises(DamagedFileError, match="does not list c"):
        check_sum(folder, "c", sums)
    (folder / "a.bin").unlink()
    with pytest.raises(DamagedFileError, match=r"a\.bin is missing"):
        check_sum(folder, "a.bin", sums)
    (folder / SUMS).unlink()
    with pytest.raises(DamagedFileError, match="SHA256SUMS is missing"):
        read_sums(folder)
