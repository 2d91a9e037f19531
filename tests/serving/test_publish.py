"""Published versions of a model that trains: what a scorer that follows them answers against a fresh export."""

import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from jfi.serving.artifact import ArtifactError
from jfi.serving.publish import PublishHook
from jfi.serving.published import MANIFEST, ROWS, numbers, path_of, read_version
from jfi.serving.scorer import Scorer
from jfi.serving.version_chain import VersionChain
from jfi.utils.files import sha256_of, write_sums

from .publishing import Trainee


def requests(scorer: Scorer) -> list:
    """Requests that read different rows of all tables."""
    bodies = [
        {
            "user": {},
            "history": [
                {"item": i + j, "category": (i + j) % 5, "rating": 3, "age": 60.0 * j + 1} for j in range(i % 7)
            ],
            "candidates": [{"item": 3 * i + j, "category": j % 5} for j in range(1 + i % 4)],
        }
        for i in range(20)
    ]
    return [scorer.reader(body) for body in bodies]


def scores(scorer: Scorer) -> list:
    return scorer.score(requests(scorer))


def follow(chain: VersionChain, scorer: Scorer) -> Scorer:
    """Applies all steps that there are."""
    while (step := chain.next()) is not None:
        if step.scorer is not None:
            scorer = step.scorer
        else:
            scorer.apply(step.change)
        chain.done(step)
    return scorer


@pytest.fixture(scope="module")
def published(exported, tmp_path_factory):
    """A folder with a whole version, four deltas and one snapshot; by version the scores of its model."""
    folder = tmp_path_factory.mktemp("published") / "versions"
    trainee = Trainee(exported.run)
    publisher, wanted, artifacts = trainee.publisher(folder, compact_every=3, compact_ratio=9.0), {}, []
    for steps in (0, 1, 3, 2, 5):
        trainee.train(steps)
        number = publisher.publish(place={"steps": steps})
        if number in (3, 6):  # compiling is what takes long
            artifacts.append(trainee.export(tmp_path_factory.mktemp("fresh") / str(number)))
            wanted[number] = scores(Scorer(artifacts[-1]))
    return folder, wanted, trainee


@pytest.fixture
def copied(published, tmp_path) -> Path:
    shutil.copytree(published[0], tmp_path / "copy")
    return tmp_path / "copy"


def test_each_version_scores_as_a_fresh_export_of_its_model(published, tmp_path):
    folder, wanted, _ = published
    kinds = [read_version(folder, number).manifest.kind for number in numbers(folder)]
    assert kinds == ["artifact", "delta", "delta", "delta", "snapshot", "delta"]
    copied, chain, scorer, found = tmp_path / "copy", None, None, {}
    for number in numbers(folder):
        shutil.copytree(path_of(folder, number), path_of(copied, number))
        if chain is None:
            chain = VersionChain(copied, Scorer)
            scorer = chain.scorer
        scorer = follow(chain, scorer)
        assert scorer.version == chain.manifest.version == number
        found[number] = scores(scorer)
        assert all(request.version is None for request in requests(scorer))
        asked = requests(scorer)
        scorer.score(asked)
        assert all(request.version == number for request in asked)
        # One that starts here, from the snapshot once there is one.
        assert scores(VersionChain(copied, Scorer).scorer) == found[number]
    assert {number: found[number] for number in wanted} == wanted and list(wanted) == [3, 6]
    assert found[4] == found[5] and len({json.dumps(one) for one in found.values()}) == 5


def test_a_delta_has_the_rows_that_have_changed(published):
    from safetensors.torch import load_file

    folder, _, trainee = published
    rows = load_file(path_of(folder, 2) / ROWS)
    tables = {name.removesuffix(".rows") for name in rows if name.endswith(".rows")}
    sizes = {one.name: one.num_embeddings for part in trainee.collections for one in configs(part)}
    assert tables == sizes.keys() and any(0 < len(rows[f"{name}.rows"]) < size for name, size in sizes.items())


def configs(collection: torch.nn.Module) -> list:
    bags = hasattr(collection, "embedding_bags")
    return collection.embedding_bag_configs() if bags else collection.embedding_configs()
