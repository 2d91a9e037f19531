"""What the README shows runs as it stands."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_drop_in_lines():
    def tables(config, *keys: str):
        return [config(name=f"{key}_table", embedding_dim=64, num_embeddings=10, feature_names=[key]) for key in keys]

    ids = KeyedJaggedTensor(
        keys=["item", "history_item", "history_rating"],
        values=torch.tensor([4, 1, 7, 7, 3, 5, 1, 7, 4, 5, 1, 2, 5]),
        lengths=torch.tensor([1, 1, 1, 2, 0, 3, 2, 0, 3]),
    )
    names = {
        "torch": torch,
        "self": SimpleNamespace(ebc=EmbeddingBagCollection(tables=tables(EmbeddingBagConfig, "item"))),
        "ec": EmbeddingCollection(tables=tables(EmbeddingConfig, "history_item", "history_rating")),
        "ids": ids,
    }
    exec(blocks("python")[0], names)
    assert names["sparse"].shape == (3, 128)


def test_the_operator_alone():
    exec(blocks("python")[1], {})


def test_the_files_that_commands_and_the_tree_name_exist():
    named = re.findall(r"(?:examples|configs|jfi|benchmarks)/[\w/.-]*[\w/]", README)
    assert named and not [path for path in named if not (ROOT / path).exists()]
    targets = re.findall(r"make (\w+)", " ".join(blocks("sh")))
    makefile = (ROOT / "Makefile").read_text()
    assert targets and all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)


@pytest.mark.parametrize("suite", ["target", "self", "layer"])
def test_the_speed_table_is_the_results_file(suite):
    from benchmarks import report, table

    results = report.read(ROOT / f"benchmarks/results/h200/{suite}.json")
    assert table.markdown(results, brief=True) in README
