"""Artifacts that somebody else has written, with right checksums: what the operator's SHA-256 and the loader refuse."""

import hashlib
import io
import json
import pickle
import shutil
import signal
import stat
import time
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path

import commands
import pytest
import torch
from hostile import Marker, attack
from safetensors.torch import load_file, save

import jfi.utils.files
from jfi.serving import artifact
from jfi.serving.artifact import ArtifactError, sha256_of
from jfi.serving.published import ARTIFACT, path_of
from jfi.serving.scorer import Scorer

from .conftest import rewriting
from .publishing import add, new_base
from .test_commands import post, said, server


def forged(path: Path, source: Path, change: Callable[[Path], object]) -> Path:
    """A copy of an artifact after `change`, with right checksums."""
    with rewriting(path, source) as folder:
        change(folder)
    return path


def longer(name: str) -> Callable[[Path], object]:
    """Makes a file a byte longer, or new."""
    return lambda folder: (folder / name).open("ab").write(b" ")


FILES = ("artifact.json", "vocabularies.json", "tables.safetensors", "model.pt2", "policy.json", "more.so")


@pytest.mark.parametrize("name", FILES)
def test_the_sha256_covers_every_file_and_is_checked_before_any_is_loaded(exported, tmp_path, monkeypatch, name):
    known = sha256_of(exported.path)
    path = forged(tmp_path / "forged", exported.path, longer(name))
    for load in ("jfi.serving.tables.safe_open", "torch._inductor.aoti_load_package", "jfi.serving.artifact.read_json"):
        monkeypatch.setattr(load, lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ArtifactError, match=f"{path} has the SHA-256 {sha256_of(path)}, which is not among those"):
        Scorer(path, sha256={known})
    # Whoever keeps the listing cannot change the files.
    shutil.copy(exported.path / "SHA256SUMS", path)
    with pytest.raises(ArtifactError) if name in FILES[:4] else pytest.raises(pytest.fail.Exception, match="loaded"):
        Scorer(path, sha256={known})


def test_each_file_is_hashed_once(exported, monkeypatch):
    hashed, sha256_of = [], jfi.utils.files.sha256_of
    monkeypatch.setattr("jfi.utils.files.sha256_of", lambda path: hashed.append(path.name) or sha256_of(path))
    _, sums = artifact.read(exported.path)
    assert sorted(hashed) == sorted(sums)


@pytest.mark.parametrize("name", FILES[:4])
def test_a_file_that_SHA256SUMS_does_not_list_is_named(exported, tmp_path, name):
    path = forged(tmp_path / "forged", exported.path, lambda folder: (folder / name).unlink())
    with pytest.raises(ArtifactError, match=f"^{path}/SHA256SUMS does not list {name}$"):
        artifact.read(path)


def test_the_sha256_is_printed_by_export_and_that_of_SHA256SUMS(exported, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "jfi.serving.export.write_package",
        lambda program, package, metadata: shutil.copy(exported.path / artifact.MODEL, package),
    )
    commands.run("export", "--run", exported.run, "--out", tmp_path / "out")
    found = hashlib.sha256((tmp_path / "out/SHA256SUMS").read_bytes()).hexdigest()
    assert f"\nsha256 {found}\n" in capsys.readouterr().out
    assert Scorer(tmp_path / "out", sha256={found}).identity == found[:12]


def test_serve_refuses_an_artifact_with_another_sha256_in_one_line(exported, tmp_path, monkeypatch, capsys):
    other = forged(tmp_path / "other", exported.path, longer("artifact.json"))
    (tmp_path / "known").write_text(f"{sha256_of(exported.path)}\n{'0' * 64}\n")
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text(f"{sha256_of(exported.path)}\n12ab\n")
    why = f"{other} has the SHA-256 {sha256_of(other)}, which is not among those that may be served"
    for known, reason in (
        (sha256_of(exported.path).upper(), why),
        (tmp_path / "known", why),
        ("8f4c", "--sha256 8f4c: is neither 64 hexadecimal digits nor a file"),
        (tmp_path / "empty", f"--sha256 {tmp_path}/empty: has no SHA-256"),
        (tmp_path / "short", f"--sha256 {tmp_path}/short: line 2 must be 64 hexadecimal digits, got '12ab'"),
    ):
        code, text = said("serve", capsys, "--artifact", other, "--sha256", known)
        assert (code, text) == (2, f"error: {reason}\n")


def test_serve_takes_the_sha256_itself(exported, request_body):
    with server("--artifact", exported.path, "--sha256", sha256_of(exported.path).upper()) as (_, address):
        assert post(address, request_body)["scores"]


def test_a_server_follows_only_artifacts_whose_sha256_it_knows(published, tmp_path):
    """The file of SHA-256 is read for each artifact."""
    folder, known = tmp_path / "versions", tmp_path / "known"
    add(folder, published.folder, 1)
    new_base(tmp_path / "other", published.folder, 2, run="other")
    new_base(tmp_path / "other", published.folder, 3, run="another")
    other, last = (sha256_of(path_of(tmp_path / "other", number) / ARTIFACT) for number in (2, 3))
    known.write_text(sha256_of(path_of(folder, 1) / ARTIFACT))

    def wait(version: int, refused: str | None) -> None:
        end = time.monotonic() + 60
        while (health := json.load(urllib.request.urlopen(f"{address}/health")))["version"] != version or (
            health["refused_reason"] is None
        ) != (refused is None):
            assert time.monotonic() < end
            time.sleep(0.01)
        assert refused is None or refused in health["refused_reason"]

    with server("--follow", folder, "--sha256", known) as (process, address):
        add(folder, tmp_path / "other", 2)
        wait(1, f"has the SHA-256 {other}, which is not among those that may be served")
        known.write_text(last)
        add(folder, tmp_path / "other", 3)
        wait(3, None)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def add_member(name: str, mode: int = 0) -> Callable[[Path], object]:
    """Adds a file to the package of the dense part."""

    def change(folder: Path) -> None:
        member = zipfile.ZipInfo(name)
        member.filename = name  # ZipInfo would cut it at NUL
        member.external_attr = mode << 16
        with zipfile.ZipFile(folder / "model.pt2", "a") as package:
            package.writestr(member, "outside")

    return change


@pytest.mark.parametrize(
    "change",
    [
        *map(add_member, ("archive/data/aotinductor/model/../../../../../outside", "../outside", "/tmp/outside")),
        *map(add_member, ("archive\\..\\..\\outside", "\\outside", "C:outside", "C:/outside", "a/..")),
        add_member("archive/data/aotinductor/model/link", stat.S_IFLNK | 0o777),
    ],
)
def test_a_package_whose_files_leave_its_folder_is_not_unpacked(exported, tmp_path, monkeypatch, change):
    path = forged(tmp_path / "forged", exported.path, change)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(ArtifactError, match="which would be unpacked outside of its folder"):
        Scorer(path)
    assert not list((tmp_path / "temporary").iterdir()) and not list(tmp_path.rglob("*outside*"))


@pytest.mark.parametrize("content", [b"", b"PK", b"no package"])
def test_what_is_no_package_is_one_line(exported, tmp_path, content):
    path = forged(tmp_path / "forged", exported.path, lambda folder: (folder / "model.pt2").write_bytes(content))
    with pytest.raises(ArtifactError, match=f"^{path} is damaged: model.pt2: "):
        Scorer(path)


def test_the_package_that_runs_is_the_one_that_was_verified(exported, tmp_path, monkeypatch):
    """Another file takes its place between the verification and the loading."""
    path = forged(tmp_path / "forged", exported.path, lambda _: None)
    read = artifact.read

    def reads_and_swaps(*arguments: object) -> tuple[dict, dict]:
        found = read(*arguments)
        (path / "model.pt2").write_bytes(b"other")
        return found

    monkeypatch.setattr(artifact, "read", reads_and_swaps)
    with pytest.raises(ArtifactError, match=r"model\.pt2 does not match its checksum"):
        Scorer(path)


class Code:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple:
        return print, ("code of a table runs",)


def with_tables(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    """Writes other tables, and what artifact.json says of them stays as it is."""

    def write(folder: Path) -> None:
        tables = change(load_file(folder / artifact.TABLES))
        (folder / artifact.TABLES).write_bytes(tables if isinstance(tables, bytes) else save(tables))

    return write


def pickled(value: object) -> bytes:
    """As `torch.save` writes it."""
    torch.save(value, stream := io.BytesIO())
    return stream.getvalue()


def header(**tensors: object) -> bytes:
    """A file of safetensors with this header and 16 bytes of tensors."""
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text + bytes(16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tables: tables | {"item": tables["item"][:, :4].clone()},
            r"'item' is \(torch.float32, \(61, 4\)\)",
        ),
        (lambda tables: tables | {"item": tables["item"][:5]}, r"'item' is \(torch.float32, \(5, 8\)\), must be"),
        (lambda tables: tables | {"item": tables["item"].double()}, r"'item' is \(torch.float64, \(61, 8\)\), must be"),
        (lambda tables: {"rating": tables["rating"]}, "'item' is None, must be"),
        (lambda tables: pickled(tables), "Error while deserializing header"),
        (lambda tables: pickled({"item": Code()}), "Error while deserializing header"),
        (lambda tables: pickle.dumps(Code(), 2), "Error while deserializing header"),
        (lambda tables: b"", "Error while deserializing header"),
        (lambda tables: save(tables)[:-1], "Error while deserializing header"),
        (lambda tables: (2**62).to_bytes(8, "little") + b"{}", "Error while deserializing header"),
        (lambda tables: header(item={"dtype": "F32", "shape": [2**60, 8], "data_offsets": [0, 16]}), "Error while"),
        (lambda tables: header(item={"dtype": "F32", "shape": [4], "data_offsets": [64, 80]}), "Error while"),
    ],
)
def test_forged_tables_are_refused(exported, tmp_path, capsys, change, message):
    path = forged(tmp_path / "forged", exported.path, with_tables(change))
    with pytest.raises(ArtifactError, match=f"^{path} is damaged: tables.safetensors: .*{message}"):
        Scorer(path)
    assert "code" not in capsys.readouterr().out


def test_an_artifact_of_an_earlier_format_is_refused_by_name(exported, tmp_path):
    """Its tables are in another file, and artifact.json has other fields."""

    def write(folder: Path) -> None:
        (folder / artifact.TABLES).rename(folder / "tables.pt")
        (folder / artifact.INFO).write_text('{"format": 3, "tables": "float32"}')

    path = forged(tmp_path / "forged", exported.path, write)
    with pytest.raises(ArtifactError, match=f"^{path} has format 3, but this version reads format 7; export again$"):
        Scorer(path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("artifact.json", lambda info: info | {"padded": 1}, r"expected `bool`, got `int` - at `\$.padded`"),
        ("artifact.json", lambda info: info | {"format": "4"}, r"expected `int`, got `str` - at `\$.format`"),
        ("artifact.json", lambda info: {"format": 7}, "object missing required field `run`"),
        ("artifact.json", lambda info: info | {"limits": {"max_candidates": 0}}, r">= 1 - at `\$.limits.max_cand"),
        ("artifact.json", lambda info: [info], "expected `object`, got `array`"),
        (
            "vocabularies.json",
            lambda values: values | {"item": [1]},
            r"expected `str`, got `int` - at `\$\[...\]",
        ),
    ],
)
def test_a_file_with_fields_of_other_types_is_one_line(exported, tmp_path, name, change, message):
    def write(folder: Path) -> None:
        (folder / name).write_text(json.dumps(change(json.loads((folder / name).read_text()))))

    path = forged(tmp_path / "forged", exported.path, write)
    with pytest.raises(ArtifactError, match=f"^{path / name} is damaged: .*{message}[^\n]*$"):
        Scorer(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda info: {"tables": info["tables"] | {"category": info["tables"]["category"] | {"width": 4}}},
        lambda info: {"inputs": info["inputs"] | {"candidates": ["category", "item"]}},
        lambda info: {"inputs": info["inputs"] | {"buckets": []}},
        lambda info: {
            "schema": info["schema"] | {"user": [{"name": "a", "kind": "number"}, {"name": "b", "kind": "number"}]}
        },
    ],
    ids=["width", "order", "buckets", "numbers"],
)
def test_what_the_package_was_not_compiled_for_is_refused(exported, tmp_path, change):
    """Its code does not check the shapes of its inputs, and would read beyond a narrower table."""

    def write(folder: Path) -> None:
        info = json.loads((folder / artifact.INFO).read_text())
        info |= change(info)
        (folder / artifact.INFO).write_text(json.dumps(info))
        tables = load_file(folder / artifact.TABLES)
        narrow = {name: rows[:, : info["tables"][name]["width"]].clone() for name, rows in tables.items()}
        (folder / artifact.TABLES).write_bytes(save(narrow))

    path = forged(tmp_path / "forged", exported.path, write)
    with pytest.raises(ArtifactError, match=r"is damaged: model\.pt2 takes other inputs than artifact\.json"):
        Scorer(path)


@pytest.mark.parametrize(
    ("kinds", "policy", "message"),
    [
        ((), None, "has a policy that cannot be used: {path}/policy.json is damaged: input data was truncated"),
        ((), "{}", "has a policy that cannot be used: {path}/policy.json is not a policy of this version"),
        (("age",), "", "is damaged: it has a policy, but no field of an event is its age"),
    ],
)
def test_a_policy_that_cannot_be_used_is_one_line(exported, tmp_path, capsys, kinds, policy, message):
    def write(folder: Path) -> None:
        info = json.loads((folder / artifact.INFO).read_text())
        info["schema"]["policy"] = {"dwell": None, "surface": None, "session": None}
        info["schema"]["event"] = [one for one in info["schema"]["event"] if one["kind"] not in kinds]
        (folder / artifact.INFO).write_text(json.dumps(info))
        (folder / artifact.POLICY).write_text(policy or "")

    path = forged(tmp_path / "forged", exported.path, write)
    code, text = said("serve", capsys, "--artifact", path)
    assert code == 2 and text.startswith(f"error: {path} {message.format(path=path)}") and text.count("\n") == 1


@pytest.mark.parametrize("versions", [{}, {"torch": None}])
def test_an_artifact_of_an_unknown_torch_is_refused_in_one_line(exported, tmp_path, capsys, versions):
    def write(folder: Path) -> None:
        info = json.loads((folder / artifact.INFO).read_text()) | {"versions": versions}
        (folder / artifact.INFO).write_text(json.dumps(info))

    path = forged(tmp_path / "forged", exported.path, write)
    code, text = said("serve", capsys, "--artifact", path)
    assert code == 2 and text.count("\n") == 1
    assert text.startswith(f"error: {path} was exported with torch of an unknown version, but this is torch ")


@pytest.mark.parametrize("few", [pytest.param(20, id="few"), pytest.param(None, id="all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["artifact.json", "vocabularies.json"])
def test_no_value_of_an_artifact_runs_code(exported, tmp_path, monkeypatch, request_body, record_property, name, few):
    (tmp_path / "marker").mkdir()
    marker, path = Marker(tmp_path / "marker", monkeypatch), tmp_path / "forged"

    def write(tree: dict) -> None:
        shutil.rmtree(path, ignore_errors=True)
        forged(path, exported.path, lambda folder: (folder / name).write_text(json.dumps(tree)))

    def serve() -> None:
        scorer = Scorer(path, output="calibrated")
        scorer.score([scorer.reader(request_body)])

    count = attack(marker, json.loads((exported.path / name).read_text()), write, [serve], few)
    record_property("cases", count)
    assert count >= 20
    serve()
