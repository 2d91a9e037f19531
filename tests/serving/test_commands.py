"""The commands as the documentation shows them, each in a process of its own."""

import contextlib
import json
import math
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from functools import partial

import commands
import pytest
import torch
from torch._inductor.cpp_builder import cpp_compiler_search
from torch._inductor.exc import CppCompileError, InductorError

from jfi.serving.artifact import MODEL, ArtifactError, read, sha256_of
from jfi.serving.published import ARTIFACT, MANIFEST, numbers, path_of, read_version
from jfi.serving.request_log import read_lines
from jfi.utils.files import LOCK, locking

from .conftest import ROOT, rewriting

pytest.importorskip("aiohttp")


@contextmanager
def server(
    *options: object,
    env: dict[str, str] | None = None,
    program: tuple[str, str] = ("-m", "jfi"),
):
    """A process of `jfi serve` and the address it says."""
    options = "serve", "--port", "0", "--drain-seconds", "0", *map(str, options)
    command = [sys.executable, "-u", *program, *options]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command, cwd=ROOT, text=True, env=env, **pipes)
    try:
        found = None
        while found is None:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            found = re.search(r"http://[\w.]+:\d+", line)
        yield process, found[0]
    finally:
        process.kill()
        process.communicate()


def post(address: str, body: dict) -> dict:
    request = urllib.request.Request(f"{address}/score", json.dumps(body).encode())
    return json.load(urllib.request.urlopen(request, timeout=60))


def test_serve_listens_on_loopback_and_finishes_what_it_accepted(exported, scorer, request_body):
    # A request waits 0.5 s for others, in which the signal comes.
    with server("--artifact", exported.path, "--max-wait-ms", 500) as (process, address):
        assert address.startswith("http://127.0.0.1:")
        answers = []
        thread = threading.Thread(target=lambda: answers.append(post(address, request_body)))
        thread.start()
        while not answers and not json.load(urllib.request.urlopen(f"{address}/health"))["requests"]:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        thread.join(60)
        assert answers[0]["scores"] == pytest.approx(scorer.score([scorer.reader(request_body)])[0], abs=1e-6)
        assert process.wait(60) == 0


def test_options_are_heard(exported, request_body, tmp_path):
    options = ["--output", "probabilities", "--access-log", "--deadline-ms", 60_000, "--body-seconds", 3]
    options += ["--log-requests", tmp_path / "requests", "--share", 1]
    with server("--artifact", exported.path, *options) as (process, address):
        assert all(0 < score < 1 for score in post(address, request_body)["scores"])
        with socket.create_connection(address.removeprefix("http://").split(":")) as half:
            half.sendall(b"POST /score HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
            assert half.recv(1000).startswith(b"HTTP/1.1 408 ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        said = process.stderr.read()
    assert (name := re.search(r"id=(\w+) POST /score 200 ", said)) and "Traceback" not in said
    (line,) = read_lines(tmp_path / "requests")
    assert (line.id, line.model.output) == (name[1], "probabilities")
    assert commands.call("serve", "--artifact", exported.path, "--share", 0.5) == 2


def test_an_artifact_without_calibration_has_all_but_calibrated_scores(
    exported, scorer, tmp_path, request_body, capsys
):
    """As of a run of an earlier version: `jfi serve` says what to do."""
    old = tmp_path / "old"
    with rewriting(old, exported.path) as folder:
        info = json.loads((folder / "artifact.json").read_text())
        assert info["calibration"]
        (folder / "artifact.json").write_text(json.dumps(info | {"calibration": None}))
    why = f"{old} has no calibration, as of a run of an earlier version; train its run again and export it"
    refused = said("serve", capsys, "--artifact", old, "--output", "calibrated")
    assert refused == (2, f"error: output is calibrated, but {why}, or choose probabilities\n")
    (logits,) = scorer.score([scorer.reader(request_body)])
    for output in ("logits", "probabilities"):
        with server("--artifact", old, "--output", output) as (_, address):
            found = post(address, request_body)["scores"]
        wanted = logits if output == "logits" else [1 / (1 + math.exp(-logit)) for logit in logits]
        assert found == pytest.approx(wanted, abs=1e-6)


def test_the_limits_of_serve_are_those_of_its_options(exported, request_body):
    hour = 3_600_000
    options = ["--queue", 2, "--max-wait-ms", hour, "--deadline-ms", hour, "--max-batch", 3]
    full, small = (request_body | {"candidates": request_body["candidates"][:1] * count} for count in (3, 1))

    def wait() -> None:
        with contextlib.suppress(OSError):  # the server's end
            post(address, small)

    with server("--artifact", exported.path, *options) as (_, address):
        # A full batch does not wait for more.
        assert len(post(address, full)["scores"]) == 3
        threads = [threading.Thread(target=wait) for _ in range(2)]
        for thread in threads:
            thread.start()
        while json.load(urllib.request.urlopen(f"{address}/health"))["requests"] < 2:
            time.sleep(0.01)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            post(address, small)
        assert all(thread.is_alive() for thread in threads)
    for thread in threads:
        thread.join()


def test_a_server_needs_neither_the_model_nor_training_nor_triton(exported, scorer, request_body):
    """Float tables need no TorchRec either."""
    script = """
import sys
for absent in ("triton", "torchrec", "fbgemm_gpu", "pyarrow"):
    sys.modules[absent] = None
from jfi import cli
assert cli.main(sys.argv[1:]) == 0
print(sorted(name for name in sys.modules if name.startswith("jfi.")))
"""
    with server("--artifact", exported.path, program=("-c", script)) as (process, address):
        wanted = scorer.score([scorer.reader(request_body)])[0]
        assert post(address, request_body)["scores"] == pytest.approx(wanted, abs=1e-6)
        process.send_signal(signal.SIGTERM)
        modules = process.stdout.read()
        assert process.wait(60) == 0
    assert "'jfi.serving.server.app'" in modules
    assert not re.search(r"jfi\.(training|models|modules|data|ops)", modules)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: (path / "SHA256SUMS").unlink(), "is not an artifact: SHA256SUMS is missing"),
        (lambda path: (path / "tables.safetensors").unlink(), "tables.safetensors is missing"),
        (
            lambda path: (path / "model.pt2").open("r+b").write(b"junk"),
            "model.pt2 is damaged: its SHA-256 is not the one in SHA256SUMS",
        ),
        (lambda path: (path / "SHA256SUMS").write_text("{"), "SHA256SUMS is damaged"),
    ],
    ids=["no artifact", "missing", "changed", "checksums"],
)
def test_a_damaged_artifact_is_refused_by_one_line(exported, tmp_path, spoil, reason):
    path = tmp_path / "copy"
    shutil.copytree(exported.path, path)
    spoil(path)
    with pytest.raises(ArtifactError, match=reason):
        read(path)


def said(name: str, capsys, *arguments: object) -> tuple[int, str]:
    """The exit code of a command in this process, and its stderr."""
    return commands.call(name, *arguments), capsys.readouterr().err


def test_options_of_a_state_are_not_ignored_without_one(tmp_path, capsys):
    options = [("--log", tmp_path), ("--feed", tmp_path), ("--keep-days", 3), ("--user-quota", 5)]
    for option, value in options:
        found = said("serve", capsys, "--artifact", tmp_path / "artifact", "--state", "none", option, value)
        assert found == (2, f"error: {option} needs a state: name it by --state\n")


@pytest.mark.slow
def test_what_cannot_be_exported_is_refused_by_one_line(exported, tmp_path, monkeypatch, capsys):
    say = partial(said, "export", capsys)
    assert say("--run", exported.run) == (2, f"error: --out {exported.path}: exists already; name a new folder\n")
    assert say("--run", tmp_path) == (2, f"error: --run {tmp_path}: not a run folder, config.yaml is missing\n")
    if not torch.cuda.is_available():
        code, text = say("--run", exported.run, "--out", tmp_path / "new", "--device", "cuda")
        assert code == 2 and text == "error: --device cuda: there is no GPU here\n"
    cpp_compiler_search.cache_clear()
    with torch._inductor.config.patch({"cpp.cxx": (None, "/no/compiler")}):
        code, text = say("--run", exported.run, "--out", tmp_path / "new")
    cpp_compiler_search.cache_clear()
    assert code == 2 and text.startswith("error: AOTInductor needs a C++ compiler") and text.count("\n") == 1
    assert not list(tmp_path.iterdir())


@contextmanager
def largest_file(size: int):
    """No file of this process may grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _compiler_without_space(program, *, package_path, inductor_configs):
    fault = CppCompileError(["g++"], "g++: fatal error: cannot write x.o: No space left on device")
    raise InductorError(fault, None) from fault


def _package_of(size: int):
    return lambda program, *, package_path, inductor_configs: package_path.write(b"libstdc++.so" + bytes(size))


@pytest.mark.parametrize(
    ("compile_with", "size", "message"),
    [
        (_compiler_without_space, 1 << 30, "No space left on device"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (None, 2000, "File too large"),
                (_package_of(100_000), 90_000, ".out.[^/]*/files/model.pt2: File too large"),
                (_package_of(0), 100, ".out.[^/]*/files/tables.safetensors: File too large"),
            )
        ),
    ],
    ids=["in what the compiler says", "in its cache", "in the package", "in the tables"],
)
def test_an_export_without_space_is_one_line_and_leaves_nothing(
    exported, tmp_path, monkeypatch, capsys, compile_with, size, message
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    if compile_with is not None:
        monkeypatch.setattr("jfi.serving.export.aoti_compile_and_package", compile_with)
    with largest_file(size):
        code, text = said("export", capsys, "--run", exported.run, "--out", tmp_path / "out")
    assert code == 3 and text.count("\n") == 1 and re.fullmatch(rf"error: /.*{message}\n", text), text
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_export_publishes_versions_that_a_server_follows(exported, scorer, tmp_path, monkeypatch, capsys, request_body):
    """With the compiled part of the run's artifact: compiling is what takes long."""
    compiled = exported.path / MODEL
    monkeypatch.setattr("jfi.serving.export.write_package", lambda _, path, *__: shutil.copy(compiled, path))
    folder, sums, wanted = tmp_path / "versions", tmp_path / "sums", scorer.score([scorer.reader(request_body)])[0]

    def publish(number: int) -> str:
        commands.run("export", "--run", exported.run, "--publish", folder)
        path, text = path_of(folder, number), capsys.readouterr().out
        assert f"published version {number}: {path} (float32 tables, for cpu)" in text
        sha256 = sha256_of(path / ARTIFACT)
        assert f"sha256 {sha256}\n" in text
        assert read_version(folder, number).manifest.parent is None
        return f"{sha256}\n"

    def until(name: str, wanted: object) -> None:
        while wanted not in str(json.load(urllib.request.urlopen(f"{address}/health"))[name]):
            assert process.poll() is None
            time.sleep(0.01)

    sums.write_text(publish(1))
    with server("--follow", folder, "--sha256", sums) as (process, address):
        second = publish(2)
        until("refused_reason", f"0000000002/artifact has the SHA-256 {second.strip()}")
        assert post(address, request_body)["version"] == 1
        sums.write_text(sums.read_text() + second)
        (path_of(folder, 2) / MANIFEST).touch()  # it is looked at again
        until("version", "2")
        found = post(address, request_body)
        assert found["version"] == 2 and found["scores"] == pytest.approx(wanted, abs=1e-6)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    say = partial(said, "export", capsys, "--run", exported.run, "--publish")
    (tmp_path / "file").touch()
    assert say(tmp_path / "file") == (2, f"error: {tmp_path}/file is a file, must be a folder of published versions\n")
    with locking(folder / LOCK, ValueError):
        code, text = say(folder)
    assert code == 2 and re.fullmatch(rf"error: {folder}: process .* publishes to this folder; .*\n", text)
    with largest_file(100):
        code, text = say(folder)
    assert code == 3 and text.endswith(": File too large\n") and text.count("\n") == 1
    assert numbers(folder) == [1, 2] and not [one for one in folder.iterdir() if "unfinished" in one.name]
    assert commands.call("export", "--run", exported.run, "--publish", folder, "--out", tmp_path / "out") == 2


def test_what_cannot_be_served_is_refused_by_one_line(exported, tmp_path, monkeypatch, capsys):
    say = partial(said, "serve", capsys)
    missing = f"error: {tmp_path} is not an artifact: SHA256SUMS is missing\n"
    assert say("--artifact", tmp_path) == (2, missing)
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact" / "SHA256SUMS").touch()
    assert say("--artifact", tmp_path) == (2, f"{missing[:-1]}; did you mean '{tmp_path / 'artifact'}'?\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, text = say("--artifact", exported.path, "--port", taken.getsockname()[1])
    assert code == 2 and text.startswith("error: 127.0.0.1:") and text.count("\n") == 1
    requests = tmp_path / "artifact/SHA256SUMS/requests"
    code, text = say("--artifact", exported.path, "--log-requests", requests)
    assert (code, text) == (3, f"error: {requests}: Not a directory\n")
    code, text = say("--artifact", exported.path, "--port", 99999)
    assert code == 2 and text.startswith("error: 127.0.0.1:99999:") and text.count("\n") == 1
