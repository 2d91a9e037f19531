"""Published versions of a model that trains: what a scorer that follows them answers against a fresh export."""

import json
import os
import shutil
import socket
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from jfi.serving import artifact
from jfi.serving.artifact import ArtifactError
from jfi.serving.export import Export
from jfi.serving.published import (
    ARTIFACT,
    CONSTANTS,
    MANIFEST,
    ROWS,
    TABLES,
    PublishedError,
    numbers,
    path_of,
    read_version,
)
from jfi.serving.scorer import Scorer
from jfi.serving.version_chain import VersionChain
from jfi.utils.files import SUMS, sha256_of, write_sums

from .publishing import Trainee, add, damage, follow, half_applied, huge, new_base, rewrite, scores


def test_each_version_scores_as_a_fresh_export_of_its_model(published, tmp_path):
    folder = published.folder
    kinds = [read_version(folder, number).manifest.kind for number in numbers(folder)]
    assert kinds == ["artifact", "delta", "delta", "delta", "snapshot", "delta"]
    copied, chain, scorer, found = tmp_path / "copy", None, None, {}
    for number in numbers(folder):
        add(copied, folder, number)
        if chain is None:
            chain = VersionChain(copied, Scorer)
            scorer = chain.start()
        scorer = follow(chain, scorer)
        assert scorer.version == chain.manifest.version == number
        assert chain.manifest.log_position == published.positions.get(number, {"steps": 2})
        found[number] = scores(scorer)
        # One that starts here, from the snapshot once there is one.
        assert scores(VersionChain(copied, Scorer).start()) == found[number]
    assert {number: found[number] for number in published.fresh} == published.fresh and list(published.fresh) == [3, 6]
    assert found[4] == found[5] and len({json.dumps(one) for one in found.values()}) == 5


def test_a_delta_has_the_rows_that_have_changed_alone(published):
    rows = load_file(path_of(published.folder, 2) / ROWS)
    sizes = {name: one.shape[0] for name, one in load_file(path_of(published.folder, 5) / TABLES).items()}
    assert {name.rpartition(".")[0] for name in rows} == sizes.keys()
    assert any(0 < len(rows[f"{name}.rows"]) < size for name, size in sizes.items())


def nan(path: Path) -> None:
    tensors = load_file(path / CONSTANTS)
    tensors[min(tensors)][:] = float("nan")
    save_file(tensors, path / CONSTANTS)


def nan_in_tables(path: Path) -> None:
    """Changes one number of rows or tables; the checksums are right."""
    tensors = load_file(path)
    name = max(name for name, one in tensors.items() if one.is_floating_point())
    tensors[name][-1, -1] = float("inf" if path.name == ROWS else "nan")
    save_file(tensors, path)
    if path.parent.name != ARTIFACT:
        return rewrite(path.parent)
    write_sums(path.parent, {one.name: sha256_of(one) for one in path.parent.iterdir() if one.name != SUMS})
    return rewrite(path.parent.parent, base=artifact.sha256_of(path.parent))


def narrower(path: Path) -> None:
    tensors = load_file(path / ROWS)
    name = next(name for name in tensors if name.endswith(".values"))
    save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, path / ROWS)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def row_outside(path: Path) -> None:
    tensors = load_file(path / ROWS)
    name = next(name for name in tensors if name.endswith(".rows"))
    save_file(tensors | {name: tensors[name] + 1000}, path / ROWS)


def other_constants(path: Path) -> None:
    tensors = load_file(path / CONSTANTS)
    tensors.pop(min(tensors))
    save_file(tensors, path / CONSTANTS)


def other_table(path: Path) -> None:
    save_file(load_file(path / ROWS) | {"color.rows": torch.zeros(1).long()}, path / ROWS)


#: What is done to version 3, and what the reason says.
FAULTS = {
    "missing": (shutil.rmtree, "0000000003 is missing"),
    "damaged rows": (lambda path: damage(path / ROWS), f"0000000003/{ROWS} is damaged"),
    "damaged constants": (lambda path: damage(path / CONSTANTS), f"{CONSTANTS} is damaged"),
    "damaged manifest": (lambda path: damage(path / MANIFEST), f"{MANIFEST} is damaged"),
    "damaged sums": (lambda path: damage(path / SUMS), f"{SUMS} is damaged"),
    "without rows": (lambda path: (path / ROWS).unlink(), f"{ROWS} is missing"),
    "without sums": (lambda path: (path / SUMS).unlink(), f"{SUMS} is missing"),
    "of another base": (lambda path: rewrite(path, base="0" * 64), "is of another base, 0000"),
    "of another chain": (lambda path: rewrite(path, parent="0" * 64), "is a change of another version 2"),
    "of another number": (lambda path: rewrite(path, version=7), "its manifest is of version 7"),
    "of another format": (lambda path: rewrite(path, format=7), "has format 7"),
    "no manifest": (lambda path: rewrite(path, content="[]"), "manifest.json is damaged: expected `object`"),
    "not finite": (lambda path: (nan(path), rewrite(path)), "has values that are not finite"),
    "not finite rows": (lambda path: nan_in_tables(path / ROWS), "has values that are not finite"),
    "huge constants": (lambda path: huge(path / CONSTANTS), "0000000003: the scores of version 3 are not finite"),
    "huge rows": (lambda path: huge(path / ROWS), "0000000003: the scores of version 3 are not finite"),
    "a folder for rows": (lambda path: as_folder(path / ROWS), f"{ROWS} is missing"),
    "a folder for sums": (lambda path: as_folder(path / SUMS), f"{SUMS} is missing"),
    "narrower": (lambda path: (narrower(path), rewrite(path)), "values must be torch.float32 of shape"),
    "row outside": (lambda path: (row_outside(path), rewrite(path)), ".rows must be from 0 to"),
    "other constants": (lambda path: (other_constants(path), rewrite(path)), "does not fit its base"),
    "other table": (lambda path: (other_table(path), rewrite(path)), "has no table for 'color.rows'"),
}


class NoReason(list):
    def append(self, reason: str) -> None:
        pytest.fail(reason)


def chain_of(folder: Path, reasons: list[str] | None = None) -> VersionChain:
    """A chain that gives its reasons to a list, or that refuses no version."""
    chain = VersionChain(folder, Scorer)
    chain.reasons = NoReason() if reasons is None else reasons
    return chain


def at_version_2(published: Path, folder: Path, reasons: list[str] | None = None) -> tuple[VersionChain, Scorer]:
    """A chain, with its scorer, in a folder that has the first two of the published versions."""
    for number in (1, 2):
        add(folder, published, number)
    chain = chain_of(folder, reasons)
    return chain, chain.start()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_chain_keeps_its_version_until_a_whole_one(published, tmp_path, fault):
    folder, reasons = tmp_path / "copy", []
    break_it, reason = FAULTS[fault]
    chain, scorer = at_version_2(published.folder, folder, reasons)
    before = scores(scorer)
    for number in (3, 4):
        add(folder, published.folder, number)
    break_it(path_of(folder, 3))
    for _ in range(3):
        scorer = follow(chain, scorer)
    assert scorer.version == chain.manifest.version == 2 and scores(scorer) == before
    assert len(reasons) == 1 and reason in reasons[0] and chain.refused_reason == reasons[0]
    # A server that starts now has the same.
    at_start: list[str] = []
    other = chain_of(folder, at_start)
    assert scores(other.start()) == before and other.manifest.version == 2 and {*at_start} == {*reasons}
    for number in (5, 6):
        add(folder, published.folder, number)
    scorer = follow(chain, scorer)
    assert (
        scorer.version == 6
        and scores(scorer) == published.fresh[6]
        and chain.refused_reason is None
        and len(reasons) == 1
    )


@pytest.mark.parametrize("change", [nan_in_tables, huge])
def test_a_snapshot_that_is_not_finite_mends_no_chain_and_is_not_started_from(published, tmp_path, change):
    folder, reasons = tmp_path / "copy", []
    chain, scorer = at_version_2(published.folder, folder, reasons)
    before = scores(scorer)
    for number in (3, 5):
        add(folder, published.folder, number)
    change(path_of(folder, 3) / ROWS)
    change(path_of(folder, 5) / TABLES)
    assert scores(follow(chain, scorer)) == before and chain.manifest.version == 2
    assert len(reasons) == 2 and all("not finite" in one for one in reasons)
    at_start: list[str] = []
    other = chain_of(folder, at_start)
    assert scores(other.start()) == before and other.manifest.version == 2 and {*at_start} == {*reasons}


def test_an_artifact_that_is_not_finite_is_not_started_from(published, tmp_path):
    add(tmp_path / "copy", published.folder, 1)
    nan_in_tables(path_of(tmp_path / "copy", 1) / ARTIFACT / artifact.TABLES)
    with pytest.raises(ArtifactError, match=r"whole version to start from: .*tables.* has values that are not finite"):
        VersionChain(tmp_path / "copy", Scorer).start()


def test_the_first_version_after_an_artifact_leaves_it_as_it_was_if_its_scores_are_not_finite(published, tmp_path):
    folder, reasons = tmp_path / "copy", []
    add(folder, published.folder, 1)
    chain = chain_of(folder, reasons)
    scorer = chain.start()
    before = scores(scorer)
    add(folder, published.folder, 2)
    huge(path_of(folder, 2) / CONSTANTS)
    assert follow(chain, scorer) is scorer and scores(scorer) == before and chain.manifest.version == 1
    assert len(reasons) == 1 and "the scores of version 2 are not finite" in reasons[0]


@pytest.mark.parametrize(("number", "last"), [(3, ROWS), (3, SUMS), (5, TABLES)])
def test_a_version_that_a_tool_is_still_copying_is_looked_at_again(published, tmp_path, monkeypatch, number, last):
    folder, reasons, read = tmp_path / "copy", [], []
    chain, scorer = at_version_2(published.folder, folder, reasons)
    add(folder, published.folder, number)
    path = path_of(folder, number) / last
    content = path.read_bytes()
    for part in (content[:10], content[:-1]):
        path.write_bytes(part)
        assert follow(chain, scorer).version == 2 and chain.refused_reason is not None
    with monkeypatch.context() as patch:
        patch.setattr("jfi.serving.version_chain.read_version", lambda *_: read.append(1))
        assert follow(chain, scorer).version == 2 and not read  # nothing has changed
    path.write_bytes(content)
    scorer = follow(chain, scorer)
    assert scorer.version == chain.manifest.version == number and chain.refused_reason is None
    assert scores(scorer) == scores(VersionChain(folder, Scorer).start())


def test_a_chain_ends_at_the_version_that_is_named(published, tmp_path):
    chain = VersionChain(published.folder, Scorer, at=3)
    scorer = chain.start()
    assert chain.manifest.version == scorer.version == 3 and scores(scorer) == published.fresh[3]
    assert chain.next() is None and chain.refused_reason is None
    with pytest.raises(ArtifactError, match="has no version 9 that can be served: the newest one up to it is 6"):
        VersionChain(published.folder, Scorer, at=9).start()
    at_version_2(published.folder, tmp_path / "copy")
    add(tmp_path / "copy", published.folder, 4)
    with pytest.raises(ArtifactError, match=r"has no version 4 that can be served: .*0000000003 is missing"):
        VersionChain(tmp_path / "copy", Scorer, at=4).start()


def test_a_gap_is_mended_by_the_version_that_was_missing(published, tmp_path):
    folder, reasons = tmp_path / "copy", []
    chain, scorer = at_version_2(published.folder, folder, reasons)
    before = scores(scorer)
    add(folder, published.folder, 4)
    for _ in range(3):
        assert scores(follow(chain, scorer)) == before
    assert chain.refused_reason is not None and "0000000003 is missing" in chain.refused_reason
    add(folder, published.folder, 3)
    found = scores(follow(chain, scorer))
    assert chain.manifest.version == 4 and chain.refused_reason is None and len(reasons) == 1
    assert found == scores(VersionChain(folder, Scorer).start()) != before


def test_a_change_that_fails_half_way_is_undone(published, tmp_path, monkeypatch):
    folder, reasons = tmp_path / "copy", []
    chain, first = at_version_2(published.folder, folder, reasons)
    before = scores(first)
    half_applied(monkeypatch, 3, can_be_undone=True)
    for number in (3, 4):
        add(folder, published.folder, number)
    assert follow(chain, first) is first and chain.manifest.version == 2 and scores(first) == before
    assert "0000000003: it could not be applied: KeyError('no table')" in chain.refused_reason
    add(folder, published.folder, 5)
    assert follow(chain, first) is first and first.version == 5 and len(reasons) == 1
    assert scores(first) == scores(VersionChain(folder, Scorer).start())


def test_after_a_change_that_cannot_be_undone_the_newest_whole_version_is_loaded(published, tmp_path, monkeypatch):
    folder, reasons = tmp_path / "copy", []
    chain, first = at_version_2(published.folder, folder, reasons)
    before = scores(first)
    half_applied(monkeypatch, 3)
    for number in (3, 4):
        add(folder, published.folder, number)
    step = chain.next()
    with pytest.raises(KeyError, match="no table") as error:
        step.apply_to(first)
    with pytest.raises(RuntimeError, match="a change of version 2 has failed; its model answers no more"):
        first.score([first.example()])
    chain.refuse(step, error.value)
    again = follow(chain, first)
    assert again is not first and again.version == chain.manifest.version == 2 and scores(again) == before
    assert "0000000003: it could not be applied: KeyError('no table')" in chain.refused_reason
    # So does one that starts now.
    assert scores(VersionChain(folder, Scorer).start()) == before
    assert chain.refused_reason == reasons[0] and chain.next() is None and len(reasons) == 1
    for number in (5, 6):
        add(folder, published.folder, number)
    assert scores(follow(chain, again)) == published.fresh[6] and chain.refused_reason is None


@pytest.mark.parametrize("failures", [1, 2])
def test_constants_that_cannot_be_loaded_change_no_row(published, tmp_path, monkeypatch, failures):
    """If those of the version before cannot be loaded either, the scorer answers no more."""
    chain, scorer = at_version_2(published.folder, tmp_path / "copy")
    before, wanted = {name: one.clone() for name, one in scorer.tables.tensors.items()}, scores(scorer)
    add(tmp_path / "copy", published.folder, 3)
    load_constants, calls = scorer.package.load_constants, []

    def fail(*arguments: object, **options: object) -> None:
        load_constants(*arguments, **options)
        calls.append(1)
        assert len(calls) > failures

    monkeypatch.setattr(scorer.package, "load_constants", fail, raising=False)
    with pytest.raises(AssertionError):
        chain.next().apply_to(scorer)
    assert all(torch.equal(one, scorer.tables.tensors[name]) for name, one in before.items())
    assert scorer.is_whole == (failures == 1) and (failures == 2 or scores(scorer) == wanted)


def test_one_that_lags_behind_goes_on_with_a_snapshot(published, tmp_path):
    folder = tmp_path / "copy"
    chain, scorer = at_version_2(published.folder, folder)
    for number in (5, 6):
        add(folder, published.folder, number)
    assert scores(follow(chain, scorer)) == published.fresh[6] and chain.refused_reason is None


def test_a_damaged_snapshot_is_not_started_from(published, tmp_path):
    shutil.copytree(published.folder, tmp_path / "copy")
    damage(path_of(tmp_path / "copy", 5) / TABLES)
    reasons = []
    chain = chain_of(tmp_path / "copy", reasons)
    # It goes from the artifact by the deltas; the snapshot is of the state that it then has.
    assert scores(chain.start()) == published.fresh[6] and chain.manifest.version == 6
    assert len(reasons) == 1 and f"0000000005/{TABLES} is damaged" in reasons[0]


def test_a_folder_without_a_whole_version_is_refused(published, tmp_path):
    folder = tmp_path / "copy"
    with pytest.raises(ArtifactError, match="copy has no whole version to start from: it has none"):
        VersionChain(folder, Scorer).start()
    add(folder, published.folder, 5)
    with pytest.raises(ArtifactError, match=r"no whole version to start from: .*0000000001/SHA256SUMS is missing"):
        VersionChain(folder, Scorer).start()
    add(folder, published.folder, 1)
    damage(path_of(folder, 1) / "artifact" / "model.pt2")
    with pytest.raises(ArtifactError, match=r"no whole version to start from: .*model\.pt2 is damaged"):
        VersionChain(folder, Scorer).start()


def test_an_intact_version_gives_way_to_no_older_one(published, tmp_path):
    """The folder begins anew, and then has a newer whole version."""
    folder, reasons = tmp_path / "copy", []
    shutil.copytree(published.folder, folder)
    chain = chain_of(folder, reasons)
    scorer = chain.start()
    shutil.rmtree(folder)
    assert chain.next() is None and not reasons
    for number in (1, 2):
        add(folder, published.folder, number)
        assert follow(chain, scorer) is scorer and chain.manifest.version == 6
    assert reasons == [f"{folder} ends with version {number}, older than the current 6" for number in (1, 2)]
    new_base(folder, published.folder, 7)
    assert scores(follow(chain, scorer)) == scores(Scorer(path_of(folder, 1) / ARTIFACT))


def killed_at(count: int, publisher, folder: Path) -> bool:
    """Publishes into a folder in a process that ends at its n-th operation on files there; False if it has fewer."""
    if not (child := os.fork()):
        seen = 0

        def hook(event: str, arguments: tuple) -> None:
            nonlocal seen
            if event.split(".")[0] in ("open", "os", "shutil") and str(folder) in str(arguments):
                seen += 1
                if seen == count:
                    os._exit(9)

        publisher._versions.path = folder
        sys.addaudithook(hook)
        publisher.publish()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.fixture(scope="module")
def traced() -> dict:
    """The programs of models by their limits."""
    return {}


@pytest.fixture
def trainee(exported, traced, monkeypatch) -> Trainee:
    """Its program, which takes seconds to trace, is traced once: publishers of a folder with an artifact compare it."""
    program = Export.program

    def once(self: Export) -> tuple:
        if self.info.limits not in traced:
            traced[self.info.limits] = program(self)
        return traced[self.info.limits]

    monkeypatch.setattr(Export, "program", once)
    return Trainee(exported.run)


def test_a_publisher_that_is_killed_leaves_a_folder_that_can_be_read(published, trainee, tmp_path):
    """Of a delta that is followed by a snapshot and the removal of what is older."""
    started = tmp_path / "started"
    shutil.copytree(published.folder, started)
    publisher = trainee.publisher(started, compact_every=1, keep=1)
    assert publisher.publish() == 7 and read_version(started, 7).manifest.kind == "snapshot"
    before = scores(chain_of(started).start())
    assert before != published.fresh[6]
    trainee.train(2)
    found, count, is_killed = {}, 0, True
    while is_killed:
        count += 1
        folder = tmp_path / str(count)
        shutil.copytree(started, folder, copy_function=os.link)
        is_killed = killed_at(count, publisher, folder)
        chain = chain_of(folder)
        found_here = scores(chain.start())
        found.setdefault(chain.manifest.version, []).append(found_here)
    assert count > 40 and found.keys() == {7, 8, 9}
    assert all(one == before for one in found[7])
    assert all(one == found[9][0] for one in found[8] + found[9]) and found[9][0] != before
    assert numbers(folder) == [1, 9]  # the base, and the snapshot

    # What the process that was killed last has left goes with the next publisher's; the compiled part is used again.
    folder = tmp_path / str(count - 1)
    trainee.train(1)
    publisher.close()  # the folder's lock is a link to that of `started`
    following = trainee.publisher(folder, compact_every=1, keep=1)
    first = following.publish()
    trainee.train(1)
    assert following.publish() == first + 2
    assert sorted(one.name for one in folder.iterdir()) == [".lock", "0000000001", f"{first + 2:010d}"]
    chain = VersionChain(folder, Scorer)
    assert scores(chain.start()) != found[9][0] and chain.manifest.base_version == 1


def test_a_second_publisher_of_a_folder_is_refused_while_the_first_lives(published, trainee, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(published.folder, folder)
    first = trainee.publisher(folder)
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    with pytest.raises(PublishedError, match=f"copy: {holder} publishes to this folder; each run needs one of its"):
        trainee.publisher(folder)
    first.close()
    second = trainee.publisher(folder)
    first.close()
    with pytest.raises(PublishedError):
        trainee.publisher(folder)
    del second
    assert trainee.publisher(folder).publish() == 7


def test_publishers_that_begin_again_and_again_leave_two_whole_versions(published, trainee, tmp_path):
    shutil.copytree(published.folder, tmp_path / "copy")
    for number in (7, 8, 9):
        assert trainee.publisher(tmp_path / "copy").publish() == number
    assert numbers(tmp_path / "copy") == [1, 8, 9]
    following = trainee.publisher(tmp_path / "copy", compact_every=2, compact_ratio=9.0)
    # A snapshot, a delta, a delta with the snapshot 13 after it, a delta.
    assert [following.publish() for _ in range(4)] == [10, 11, 13, 14]


def test_a_write_that_fails_loses_no_row(published, trainee, tmp_path, monkeypatch):
    folder = tmp_path / "copy"
    shutil.copytree(published.folder, folder)
    publisher = trainee.publisher(folder, compact_ratio=9.0)
    assert publisher.publish() == 7
    before = {name: one.clone() for name, one in trainee.model.state_dict().items()}
    trainee.train(1)
    with monkeypatch.context() as patch:
        patch.setattr("jfi.serving.published.write_sums", lambda *_: (_ for _ in ()).throw(OSError(28, "no space")))
        with pytest.raises(OSError, match="no space"):
            publisher.publish()
    assert [one.name for one in folder.iterdir() if one.name.endswith(".unfinished")] == [] and numbers(folder)[-1] == 7
    assert publisher.publish() == 8
    rows = load_file(path_of(folder, 8) / ROWS)
    for key, weight in trainee.model.state_dict().items():
        name = key.removesuffix(".weight").rpartition(".")[2]
        if f"{name}.rows" in rows:
            changed = (weight != before[key]).any(1).nonzero().flatten()
            assert set(changed.tolist()) <= set(rows[f"{name}.rows"].tolist())
            assert torch.equal(rows[f"{name}.values"], weight[rows[f"{name}.rows"]])
    assert publisher.publish(whole=True) == 9 and read_version(folder, 9).manifest.parent is None
    following, both = VersionChain(folder, Scorer), []
    both.append(scores(following.start()))
    shutil.rmtree(path_of(folder, 9))
    both.append(scores(VersionChain(folder, Scorer).start()))
    assert both[0] == both[1]


@pytest.mark.parametrize(("fault", "whole"), [("read", False), ("sync", False), ("sync", True)])
def test_a_version_follows_the_one_whose_writer_failed_when_it_had_its_name(
    published, trainee, tmp_path, monkeypatch, fault, whole
):
    folder = tmp_path / "copy"
    shutil.copytree(published.folder, folder)
    publisher = trainee.publisher(folder, compact_ratio=9.0)
    assert publisher.publish() == 7
    trainee.train(1)

    def fail(path: Path, *number: int) -> None:
        if path == folder:
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("jfi.serving.published.read_version" if fault == "read" else "jfi.utils.files.sync", fail)
        with pytest.raises(OSError, match="error") if fault == "sync" else nullcontext():
            publisher.publish(whole=whole)
    assert numbers(folder)[-1] == 8
    trainee.train(1)
    assert publisher.publish() == 9
    # A whole one may have what no row says, so another whole one follows it.
    parent = None if whole else read_version(folder, 8).digest
    assert read_version(folder, 9).manifest.parent == parent
    assert chain_of(folder).start().version == 9


def test_another_model_gets_an_artifact_of_its_own(published, trainee, tmp_path, monkeypatch):
    """Its limits are others; compiling is left out."""
    shutil.copytree(published.folder, tmp_path / "copy")
    calls = []
    monkeypatch.setattr("jfi.serving.publish.Export.write", lambda *_: calls.append(1) or "0" * 64)
    trainee.limits = replace(trainee.limits, max_candidates=7)
    assert trainee.publisher(tmp_path / "copy").publish() == 7
    assert calls == [1] and read_version(tmp_path / "copy", 7).manifest.kind == "artifact"


def test_models_that_cannot_be_published_are_refused_by_name(trainee, tmp_path):
    with pytest.raises(ValueError, match="compact_every must be at least 1, got 0"):
        trainee.publisher(tmp_path, compact_every=0)
    with pytest.raises(ValueError, match=r"embedding_collection must be a fused collection.*got EmbeddingCollection"):
        trainee.with_plain_tables().publisher(tmp_path)
    with pytest.raises(ValueError, match=r"embedding_collection has ema_decay.*optimizer\.ema_decay: null"):
        trainee.with_averages().publisher(tmp_path)
