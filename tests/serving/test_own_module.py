"""A model of the user's own that holds the layer, compiled and run without jfi."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import docs_models
import pytest
import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

import jfi.ops
import jfi.serving
from jfi import JaggedFeatureInteraction, KeyBias, SequenceFeatureConfig
from jfi.serving.artifact import ArtifactError
from jfi.serving.own_module import _target_attention, program_of

HISTORY = ["history_item", "history_rating"]


class Own(nn.Module):
    """Not a SequenceDLRM."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingConfig(name=f"{key}_table", embedding_dim=16, num_embeddings=30, feature_names=[key])
            for key in HISTORY
        ]
        item = EmbeddingBagConfig(name="item_table", embedding_dim=16, num_embeddings=30, feature_names=["item"])
        self.bags = EmbeddingBagCollection(tables=[item])
        feature = SequenceFeatureConfig("taste", HISTORY, ["item"], bias=KeyBias("history_age", num_buckets=8))
        collection = EmbeddingCollection(tables=tables)
        self.layer = JaggedFeatureInteraction([feature], 16, num_heads=2, embedding_collection=collection)
        self.head = nn.Linear(32, 1)

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        ids = KeyedJaggedTensor(["item", *HISTORY, "history_age"], values, lengths=lengths)
        pooled = self.bags(ids)
        return self.head(torch.cat([pooled.values(), self.layer(ids, pooled).values()], dim=1)).squeeze(1)


def batch(*lengths: int, device: torch.device) -> tuple[Tensor, Tensor]:
    own = torch.tensor([1] * len(lengths) + [*lengths] * 3, device=device)
    return torch.randint(0, 8, (int(own.sum()),), device=device), own


def run_without_jfi(package: Path, batches: list[tuple]) -> int:
    """Compares the package with what each batch wants, in a process without jfi; returns the most bytes of a call."""
    torch.save(batches, package.with_suffix(".batches"))
    script = [sys.executable, Path(__file__).with_name("own_model.py"), package, package.with_suffix(".batches")]
    done = subprocess.run(script, cwd=package.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak, modules = done.stdout.splitlines()
    assert modules == "[]"
    return int(peak)


DYNAMIC = {0: torch.export.Dim.DYNAMIC}


@pytest.mark.slow  # compiling takes half a minute
def test_a_package_of_an_own_model_runs_without_jfi(tmp_path, device):
    model = Own().to(device).eval()
    nn.init.normal_(model.layer.attention["taste"].bucket_bias)
    package = tmp_path / "own.pt2"
    example = batch(2, 0, 3, 5, device=device)
    others = jfi.serving.export_module(model, example, package, dynamic_shapes=(DYNAMIC, DYNAMIC))
    assert others == []
    with torch.no_grad():
        given = [batch(*lengths, device=device) for lengths in ((2, 0, 3, 5), (7,), range(40), (0, 1), (0, 0))]
        batches = [(*one, model(*one)) for one in given]
    assert batches[2][-1].std() > 0.02
    run_without_jfi(package, batches)
    with pytest.raises(ArtifactError, match=r"own.pt2 exists already"):
        jfi.serving.export_module(model, example, package)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own.batches", "own.pt2"]


def test_a_package_with_its_own_standard_library_is_refused(tmp_path, monkeypatch):
    def compile_statically(program, *, package_path, inductor_configs):
        package_path.write(b"machine code")

    monkeypatch.setattr("jfi.serving.export.aoti_compile_and_package", compile_statically)
    with pytest.raises(ArtifactError, match=r"links the C\+\+ standard library statically.*set CXX"):
        jfi.serving.export_module(nn.Linear(2, 1), (torch.ones(3, 2),), tmp_path / "own.pt2")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("groups", [1, 4])
def test_the_form_without_python_is_the_operator(groups):
    offsets = torch.tensor([0, 3, 3, 8, 9])
    query, key, value = torch.randn(4, 2, 4, 8), torch.randn(9, groups, 8), torch.randn(9, groups, 5)
    table, buckets, scale = torch.randn(3, 4), torch.randint(0, 3, (9,)), torch.rand(9)
    table[1, 2] = -torch.inf
    tables, ids = torch.randn(2, 20, groups, 8), torch.randint(0, 20, (2, 9))

    def found(*events: Tensor | None, key: Tensor = key, rows: tuple = ([], [])) -> Tensor:
        return _target_attention(query, key, events[0], offsets, *events[1:], *rows, 0.3, None, "torch")[0]

    def wanted(value: Tensor | None = None, key: Tensor | tuple = key, **options: object) -> Tensor:
        return jfi.ops.target_attention(query, key, value, offsets=offsets, scale=0.3, **options)

    close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)
    nothing = (None,) * 4
    close(found(None, *nothing), wanted())
    close(found(value, table[buckets], None, scale, None), wanted(value, key_bias=table[buckets], value_scale=scale))
    close(found(None, table, buckets, None, None), wanted(key_bias=table, key_bias_index=buckets))
    rows = [one.flatten(1) for one in tables], list(ids)
    close(found(None, *nothing, rows=rows), wanted(key=tuple(tables), indices=tuple(ids)))
    if groups == 1:
        close(found(*nothing, key[:, 0, 4:], key=key[..., :4]), wanted())


@pytest.mark.parametrize("name", docs_models.MODELS)
def test_models_of_the_docs_have_a_program_without_python(name):
    model, dense, ids = docs_models.MODELS[name]()
    module = docs_models.OfTensors(model.eval(), ids.keys())
    given = dense, ids.values(), ids.lengths()
    program = program_of(module, given, (DYNAMIC,) * 3).module()
    for batch in (given, docs_models.other_batch(dense, ids)):
        torch.testing.assert_close(program(*batch), module(*batch), rtol=1e-4, atol=1e-5)


def test_an_example_that_does_not_stand_for_all_sizes_is_refused(device):
    model = Own().to(device).eval()
    with pytest.raises(ValueError, match="'lengths' could only be from 4 to 7; give two samples or more"):
        program_of(model, batch(3, device=device), (DYNAMIC, DYNAMIC))
    most = {0: torch.export.Dim("ids", max=900)}, {0: 4 * torch.export.Dim("samples", max=50)}
    program_of(model, batch(3, 1, device=device), most)


class Attends(nn.Module):
    """Target attention with a bias and a value scale by event: "rows" and "ids" in one tile, "many" in several."""

    def __init__(self, case: str, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.case, self.queries = case, 20 if case == "many" else 4
        self.register_buffer("table", torch.randn(1000, 1, 64, device=device).to(dtype))
        self.register_buffer("ages", torch.randn(8, 4, device=device))

    def forward(self, query: Tensor, ids: Tensor, ages: Tensor, scale: Tensor, offsets: Tensor) -> Tensor:
        options = {"offsets": offsets, "key_bias": self.ages, "key_bias_index": ages, "value_scale": scale}
        if self.case == "ids":
            return jfi.ops.target_attention(query, (self.table,) * 2, indices=(ids, ages), **options)
        return jfi.ops.target_attention(query, self.table[ids], **options)

    def batch(self, *lengths: int) -> tuple[Tensor, ...]:
        device, samples, events = self.table.device, len(lengths), sum(lengths)
        query = torch.randn(samples, self.queries, 4, 64, device=device).to(self.table.dtype)
        ids, ages = torch.randint(0, 1000, (events,), device=device), torch.randint(0, 8, (events,), device=device)
        offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
        return query, ids, ages, torch.rand(events, device=device), offsets


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["rows", "ids", "many"])
def test_a_package_for_a_gpu_has_the_kernels(case, dtype, device, tmp_path):
    module, package = Attends(case, dtype, device), tmp_path / "own.pt2"
    jfi.serving.export_module(module, module.batch(2, 0, 3), package, dynamic_shapes=(DYNAMIC,) * 5)
    large = (3, 0, 200_000 if case != "many" else 40_000, 17)  # [S, T, H, D] of 0.4 GB and more
    given = [module.batch(*lengths) for lengths in ((5,), (0, 0), (1, 700, 0, 65, *[30] * 300), large)]
    peak = run_without_jfi(package, [(*one, module(*one)) for one in given])
    assert 0 < peak < sum(large) * module.queries * 4 * 64 * dtype.itemsize / 4


@pytest.mark.slow  # compiling takes 20 seconds
def test_a_package_for_a_cpu_takes_no_users(tmp_path):
    """Not even eagerly a tensor of no elements may be viewed with a size of -1; compiled, F.pad of one reads it."""
    module, package = Attends("rows", torch.float32, torch.device("cpu")), tmp_path / "own.pt2"
    jfi.serving.export_module(module, module.batch(2, 0, 3), package, dynamic_shapes=(DYNAMIC,) * 5)
    given = [module.batch(*lengths) for lengths in ((), (0,), (1, 700, 0))]
    run_without_jfi(package, [(*one, module(*one)) for one in given])


class Encodes(nn.Module):
    def forward(self, x: Tensor, offsets: Tensor, distance: Tensor) -> Tensor:
        return jfi.ops.jagged_attention(x, x, x, query_offsets=offsets, causal=True, position_bias=distance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_encoder_for_a_gpu(device, tmp_path):
    def events(*lengths: int) -> tuple[Tensor, ...]:
        x = torch.randn(sum(lengths), 2, 32, device=device)
        return (
            x,
            torch.tensor([0, *lengths], device=device).cumsum(0),
            torch.linspace(0, 1, 8, device=device).view(4, 2),
        )

    package, shapes = tmp_path / "own.pt2", (DYNAMIC, DYNAMIC, {})
    jfi.serving.export_module(Encodes(), events(2, 0, 3), package, dynamic_shapes=shapes)
    run_without_jfi(package, [(*given, Encodes()(*given)) for given in (events(3), events(4, 0, 300, 1))])


def test_the_config_of_the_docs_has_the_inputs_and_outputs_of_a_package():
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    config = text.split("```proto\n")[1].split("```")[0]
    found = re.findall(r'name: "((?:IN|OUT)PUT__\d+)", data_type: TYPE_(\w+), dims: \[ (.*?) \]', config)
    shown = {"__name__": "docs"}
    exec(re.search(r"```python\n(.*?)```", text.split("## A model of your own")[1], re.DOTALL)[1], shown)
    shapes = (shown["varies"], shown["varies"])
    program = torch.export.export(shown["model"], shown["example"], dynamic_shapes=shapes, strict=False)
    types = {torch.int64: "INT64", torch.float32: "FP32"}
    values = {node.name: node.meta["val"] for node in program.graph.nodes if "val" in node.meta}
    wanted = []
    for kind, names in (("IN", program.graph_signature.user_inputs), ("OUT", program.graph_signature.user_outputs)):
        sizes = [["-1" if isinstance(n, torch.SymInt) else str(n) for n in values[name].shape] for name in names]
        rows = zip(names, sizes, strict=True)
        wanted += [(f"{kind}PUT__{i}", types[values[name].dtype], ", ".join(x)) for i, (name, x) in enumerate(rows)]
    assert found == wanted


def test_what_needs_python_is_refused_by_name(tmp_path):
    arguments = torch.randn(5, 2, 8), torch.tensor([0, 2, 5]), torch.randn(4, 2)
    with pytest.raises(ValueError, match="uses jfi::bucket_edges, jfi::jagged_attention_fwd, which cannot be exported"):
        jfi.serving.export_module(Encodes(), arguments, tmp_path / "x.pt2")
    with pytest.raises(AttributeError, match="no attribute 'export_models'"):
        jfi.serving.export_models  # noqa: B018
    assert not list(tmp_path.iterdir())
