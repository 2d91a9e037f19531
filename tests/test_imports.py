"""Who may import whom: by the files' import lines, and in a fresh process for each package.

utils, kernels, cpu <- ops <- modules <- models, cuda_graphs <- distributed <- training, serving, state
<- baselines, follow <- cli; ops <- table1, which nothing imports;
data beside models; history_policies, events <- data; semantic_ids <- modules, data.

Serving has two sides: the export needs models and data, the server only its own package and jfi.utils.
"""

import ast
import json
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

#: What must not have been imported after importing the first.
FORBIDDEN = {
    "jfi": {"torch", "torchrec", "triton", "fbgemm_gpu"},
    "jfi.cli": {"torch", "numpy", "pyarrow"},
    "jfi.utils.encoding": {"torch", "pyarrow"},
    "jfi.utils.errors": {"torch", "numpy"},
    "jfi.ops": {
        "torchrec",
        "fbgemm_gpu",
        "triton",
        "jfi.modules",
        "jfi.models",
        "jfi.data",
        "jfi.training",
        "jfi.kernels.common.launch",
        "jfi.kernels.target_attention",
        "jfi.kernels.jagged_attention",
        "jfi.kernels.absorbed_weights",
        "jfi.table1",
    },
    "jfi.table1": {"torchrec", "fbgemm_gpu", "triton", "jfi.modules", "jfi.table1.kernels"},
    "jfi.modules": {"jfi.models", "jfi.data", "jfi.training"},
    "jfi.models": {"jfi.data", "jfi.training", "jfi.table1"},
    "jfi.events": {"torchrec", "pyarrow", "jfi.data"},
    "jfi.data": {"jfi.modules", "jfi.models", "jfi.training", "jfi.ops", "jfi.baselines", "sklearn"},
    "jfi.semantic_ids": {
        "torchrec",
        "fbgemm_gpu",
        "triton",
        "pyarrow",
        "sklearn",
        "matplotlib",
        "jfi.ops",
        "jfi.modules",
        "jfi.models",
        "jfi.data",
        "jfi.training",
    },
    "jfi.history_policies": {
        "pyarrow",
        "sklearn",
        "matplotlib",
        "jfi.ops",
        "jfi.modules",
        "jfi.models",
        "jfi.data",
        "jfi.training",
    },
    "jfi.semantic_ids.content": {"sklearn", "jfi.modules", "jfi.models", "jfi.training", "jfi.ops", "jfi.baselines"},
    "jfi.training": {"jfi.baselines", "sklearn"},
    "jfi.baselines": {"jfi.serving", "sklearn"},
    "jfi.serving.export": {"jfi.data", "jfi.training", "aiohttp"},
    "jfi.serving.dataset_schema": {"jfi.modules", "jfi.models", "jfi.training", "aiohttp"},
    "jfi.serving.scorer": {
        "torchrec",
        "fbgemm_gpu",
        "jfi.ops",
        "jfi.modules",
        "jfi.models",
        "jfi.data",
        "jfi.training",
    },
}


#: A process per module, forked from one that has imported what takes long and the module may import. Each prints what
#: it has imported.
IMPORT = """
import importlib, json, os, sys
for heavy, modules in json.loads(sys.argv[1]).items():
    if heavy:
        importlib.import_module(heavy)
    for module in modules:
        if not os.fork():
            importlib.import_module(module)
            print(module, *sys.modules, flush=True)
            os._exit(0)
        assert os.wait()[1] == 0, module
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    """By module, what importing it imports."""
    groups = {"": [], "torch": [], "torchrec": []}
    for module, forbidden in FORBIDDEN.items():
        groups["" if "torch" in forbidden else "torch" if "torchrec" in forbidden else "torchrec"].append(module)
    command = [sys.executable, "-c", IMPORT, json.dumps(groups)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line.split() for line in run.stdout.splitlines()]
    return {module: set(modules) for module, *modules in lines}


@pytest.mark.parametrize("module", FORBIDDEN)
def test_imports(imported, module):
    assert not FORBIDDEN[module] & imported[module]


#: As IMPORT; prints which settings of the process the import of each module has changed.
CHANGE = """
import importlib, json, locale, logging, os, random, signal, sys, threading, warnings
import numpy, torch, torchrec

def settings():
    loggers = [logging.root, *(logging.getLogger(name) for name in already)]
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "signals": {int(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
        "warnings": [str(one) for one in warnings.filters],
        "hooks": [str(hook) for hook in (sys.excepthook, threading.excepthook, warnings.showwarning)],
        "threads": threading.active_count(),
        "locale": locale.setlocale(locale.LC_ALL),
        "loggers": {
            one.name: [one.level, one.propagate, one.disabled, len(one.filters), len(one.handlers)] for one in loggers
        },
        "random numbers": [str(random.getstate()), str(numpy.random.get_state()), torch.get_rng_state().tolist()],
        "torch": [
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            str(torch.get_default_dtype()),
            str(torch.get_default_device()),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_grad_enabled(),
            torch.backends.cudnn.benchmark,
        ],
    }

for module in sys.argv[1:]:
    if not os.fork():
        already = [name for name, one in logging.root.manager.loggerDict.items() if isinstance(one, logging.Logger)]
        before = settings()
        importlib.import_module(module)
        after = settings()
        print(json.dumps([module, {name: after[name] for name in after if after[name] != before[name]}]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, module
"""


def test_an_import_changes_no_setting_of_the_process():
    """That of each module of tables can be the first, too."""
    tables = [f"jfi.tables.{path.stem}" for path in (ROOT / "tables").glob("*.py")]
    # These import layers, whose package exports them.
    tables = [name for name in tables if not name.endswith(("__init__", "fused_embedding_collections", "growing_ids"))]
    others = ["jfi.distributed", "jfi.serving", "jfi.serving.scorer", "jfi.serving.server.batcher", *tables]
    command = [sys.executable, "-c", CHANGE, *FORBIDDEN, *others]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert [module for module, _ in lines] == command[3:]
    assert [(module, changed) for module, changed in lines if changed] == []


def test_packages_can_be_imported_where_those_that_few_functions_need_are_absent():
    """Such as pictures, command lines, preparation out of memory, HTTP and boosting."""
    script = """
import importlib, sys
training = ("matplotlib", "tensorboard", "duckdb", "sklearn")
for absent in (*training, "aiohttp", "orjson", "prometheus_client"):
    sys.modules[absent] = None
for module in ("", ".data", ".serving", ".training", ".baselines", ".semantic_ids", ".history_policies"):
    importlib.import_module("jfi" + module)
import jfi
[getattr(jfi, name) for name in jfi.__all__]
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_operators_work_where_other_packages_are_absent():
    script = """
import os, sys
import torch
assert "triton" not in sys.modules
for absent in ("triton", "torchrec", "fbgemm_gpu"):
    if not os.fork():
        sys.modules[absent] = None
        import jfi.ops
        x = torch.randn(2, 1, 1, 4, requires_grad=True)
        offsets = torch.tensor([0, 2, 5])
        jfi.ops.target_attention(x, torch.randn(5, 1, 4), offsets=offsets).sum().backward()
        if absent == "triton":
            from jfi.utils.context import interprets
            assert interprets() is False
            try:
                jfi.ops.target_attention(x, torch.randn(5, 1, 4), offsets=offsets, impl="triton")
            except ValueError as fault:
                assert "impl='triton' must come with tensors on a GPU" in str(fault)
            else:
                raise AssertionError("kernels without Triton")
        os._exit(0)
    assert os.wait()[1] == 0, absent
"""
    subprocess.run([sys.executable, "-c", script], check=True)


ROOT = Path(__file__).parents[1] / "jfi"


def private_uses(source: str, area: str) -> list[str]:
    """What a file of jfi/<area> uses of other folders' private names: imports, and attributes of imported modules."""

    def is_foreign(module: str | None) -> bool:
        parts = (module or "").split(".")
        return parts[0] == "jfi" and parts[1:2] != [area]

    def is_private(name: str) -> bool:
        return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))

    tree, modules, found = ast.parse(source), {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and is_foreign(node.module):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                modules[alias.asname or alias.name] = name
                found += [name] if is_private(name) else []
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if is_foreign(alias.name):
                    modules[alias.asname or alias.name] = alias.name
                    found += [alias.name] if is_private(alias.name) else []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = ast.unparse(node.value)
            if any(owner == name or owner.startswith(f"{name}.") for name in modules):
                found.append(f"{owner}.{node.attr}")
    return found


@pytest.mark.parametrize("area", sorted({path.relative_to(ROOT).parts[0] for path in ROOT.glob("*/*.py")}))
def test_nobody_uses_another_folders_private_names(area):
    for path in (ROOT / area).rglob("*.py"):
        assert not private_uses(path.read_text(), area), path


def test_private_names_are_found():
    source = """
from jfi.ops._attention import attention
from jfi.ops.target_attention import _forward, target_attention
from jfi.modules import inputs
import jfi.kernels.common._secret as secret
inputs._private(inputs.public, inputs.__doc__, self._own)
"""
    assert private_uses(source, "serving") == [
        "jfi.ops._attention.attention",
        "jfi.ops.target_attention._forward",
        "jfi.kernels.common._secret",
        "inputs._private",
    ]
    assert private_uses(source, "ops") == ["jfi.kernels.common._secret", "inputs._private"]


#: By area of jfi/, the other areas that its files may import; `reference` and `plan`, kernels/plan.py, are files.
MAY_IMPORT = {"utils": set(), "reference": set(), "plan": {"utils"}}
MAY_IMPORT["kernels"] = MAY_IMPORT["cpu"] = {"utils", "reference", "plan"}
MAY_IMPORT["ops"] = MAY_IMPORT["kernels"] | {"kernels", "cpu"}
MAY_IMPORT["table1"] = MAY_IMPORT["ops"] | {"ops"}
MAY_IMPORT["history_policies"] = MAY_IMPORT["events"] = {"utils"}
MAY_IMPORT["semantic_ids"] = {"utils", "data"}
MAY_IMPORT["data"] = {"utils", "events", "history_policies", "semantic_ids"}
MAY_IMPORT["modules"] = {"utils", "reference", "plan", "ops", "semantic_ids"}
MAY_IMPORT["models"] = MAY_IMPORT["cuda_graphs"] = MAY_IMPORT["modules"] | {"modules"}
MAY_IMPORT["distributed"] = MAY_IMPORT["models"] | {"models", "cuda_graphs"}
MAY_IMPORT["training"] = MAY_IMPORT["serving"] = MAY_IMPORT["distributed"] | {"distributed", "data"}
MAY_IMPORT["training"] |= {"events", "history_policies"}
MAY_IMPORT["serving"] = MAY_IMPORT["state"] = MAY_IMPORT["serving"] | {"events", "history_policies", "serving", "state"}
MAY_IMPORT["baselines"] = MAY_IMPORT["training"] | {"training", "serving"}
MAY_IMPORT["follow"] = MAY_IMPORT["training"] | {"training", "serving", "state"}
MAY_IMPORT["cli"] = MAY_IMPORT["__main__"] = MAY_IMPORT["baselines"] | {
    "baselines",
    "follow",
    "semantic_ids",
    "state",
    "cli",
}


def import_graph() -> dict[str, set[str]]:
    """Returns, by file of jfi/, the files of jfi/ that its import lines name, those within functions included."""
    paths = {path.relative_to(ROOT).as_posix(): path for path in ROOT.rglob("*.py")}
    files = {"jfi." + name[:-3].replace("/", ".").removesuffix(".__init__"): name for name in paths}
    graph = {name: set() for name in paths}
    for name, path in paths.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                # `from package import module` names the module, not the package.
                named = [files.get(f"{node.module}.{alias.name}") or files.get(node.module) for alias in node.names]
            else:
                named = [files.get(alias.name) for alias in node.names] if isinstance(node, ast.Import) else []
            graph[name].update(file for file in named if file not in (None, name))
    return graph


#: The folder tables holds files of several layers, each of which follows its layer's rules; others are modules.
LAYER_OF_TABLES = {"kernels": "kernels", "__init__": "ops"}
LAYER_OF_TABLES |= dict.fromkeys(("step_rows", "gather_rows", "rows_by_id", "map_ids"), "ops")


def area_of(file: str) -> str:
    if file.startswith("tables/"):
        return LAYER_OF_TABLES.get(file.split("/")[1].removesuffix(".py"), "modules")
    return "plan" if file == "kernels/plan.py" else file.split("/")[0].removesuffix(".py")


def test_imports_go_in_one_direction():
    graph, areas = import_graph(), MAY_IMPORT.keys()
    assert {area_of(file) for file in graph} - {"__init__"} == areas, "a folder or file that MAY_IMPORT does not know"
    found = {
        (file, other)
        for file, others in graph.items()
        for other in others
        if {area_of(file), area_of(other)} <= areas
        and area_of(other) not in MAY_IMPORT[area_of(file)] | {area_of(file)}
    }
    assert not found


def test_the_core_has_no_import_circle():
    core = {"utils", "reference", "plan", "kernels", "cpu", "ops"}
    core |= {"table1", "modules", "models", "cuda_graphs", "distributed"}
    graph = {file: others for file, others in import_graph().items() if area_of(file) in core}
    TopologicalSorter(graph).prepare()  # raises CycleError with the files of a circle
