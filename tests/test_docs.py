"""What the documentation shows works: Python runs, commands parse, links and names exist, tables are the results.

A comment `<!-- setup ... -->` or `<!-- check ... -->` in a page is Python that readers need not see; it runs in place
among the page's ```python blocks.
"""

import argparse
import importlib
import re
import runpy
import shlex
from itertools import dropwhile
from pathlib import Path

import pytest
import yaml
from docs_models import PYTHON, python_of
from torch.distributed.run import get_args_parser

import jfi
from benchmarks import readme
from jfi.cli import COMMANDS, options, run
from jfi.cli import settings as cli_settings
from jfi.cli.options import OptionParser
from jfi.training import config_parser as settings
from jfi.utils.lockstep import LOCKSTEP

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
PAGES = ["README.md", "CONTRIBUTING.md", "benchmarks/README.md"]
NOTES = ["benchmarks/NOTES.md", *sorted(f"benchmarks/notes/{path.name}" for path in ROOT.glob("benchmarks/notes/*.md"))]
PAGES += NOTES
PAGES += [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {page: (ROOT / page).read_text() for page in PAGES}
INTERNALS = "docs/internals.md"


@pytest.mark.parametrize("page", [page for page in PAGES if python_of(page)])
def test_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for block in python_of(page):
        exec(compile(block, page, "exec"), names)


def test_get_started_shows_the_example_of_a_dataframe():
    section = TEXTS["docs/get-started.md"].split("\n## Your DataFrame\n")[1].split("\n## ")[0]
    shown = "".join(match["shown"] or "" for match in PYTHON.finditer(section))
    example = (ROOT / "examples/dataframe_to_scores.py").read_text().split('"""')[2]
    assert sorted(filter(None, shown.splitlines())) == sorted(filter(None, example.splitlines()))


def commands() -> list[tuple[str, str]]:
    """Page and command of every ```sh block, continued lines joined, comments cut off."""
    found = []
    for page, text in TEXTS.items():
        for block in re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL):
            lines = block.replace("\\\n", " ")
            if lines.startswith("curl") and "'{" in lines:  # its body is tested in tests/serving
                continue
            found += [
                (page, line.split(" #")[0].strip())
                for line in map(str.strip, lines.splitlines())
                if line[:1] not in ("", "#")
            ]
    return found


class Parsed(Exception):
    """Raised in place of what a command would do."""


def then_stop(parse):
    def parse_and_stop(*arguments, **keywords):
        parse(*arguments, **keywords)
        raise Parsed

    return parse_and_stop


def run_python_command(words: list[str], monkeypatch) -> None:
    """Runs the command, script or module until it has parsed its arguments."""
    is_jfi = words[0] == "jfi" and {"--help", "--help=all"}.isdisjoint(words)
    # Imported before anything is patched: it would keep what it imports by name.
    modules = [
        settings,
        cli_settings,
        *([importlib.import_module(f"jfi.cli.{COMMANDS[words[1]][0]}")] if is_jfi else []),
    ]
    for module in modules:
        if hasattr(module, "parse_config"):
            monkeypatch.setattr(module, "parse_config", then_stop(module.parse_config))
    for parser in (argparse.ArgumentParser, OptionParser):
        monkeypatch.setattr(parser, "parse_args", then_stop(parser.parse_args))
    if is_jfi:
        with pytest.raises(Parsed):
            run(words[1:])
        return
    name, *arguments = words[1:] if words[0] == "-m" else words
    monkeypatch.setattr("sys.argv", [name, *arguments])
    monkeypatch.syspath_prepend(Path(name).parent)  # as Python does for a script
    with pytest.raises(Parsed):
        (runpy.run_module if words[0] == "-m" else runpy.run_path)(name, run_name="__main__")


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")  # modules that this file imports, run as scripts
@pytest.mark.parametrize(("page", "command"), commands())
def test_commands_are_known(page, command, monkeypatch):
    words = list(dropwhile(re.compile(r"[A-Z_]+=").match, shlex.split(command.split(" < ")[0])))
    monkeypatch.chdir(ROOT)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    elif words[0] == "." or words[:3] == ["python", "-m", "venv"]:
        assert words[-1] == ("venv/bin/activate" if words[0] == "." else "venv")
    elif words[0] == "torchrun":
        start = words.index("-m")
        get_args_parser().parse_args([*words[1:start], "script.py"])
        run_python_command(words[start + (words[start + 1] == "jfi") :], monkeypatch)
    elif words[:3] == ["python", "-m", "lmdb"]:
        found, (action, *target) = importlib.import_module("lmdb.tool").make_parser().parse_args(words[3:])
        assert found.env and ((action == "copy" and target) or (action == "rewrite" and found.target_env))
    elif words[0] == "python":
        run_python_command(words[1:], monkeypatch)
    elif words[0] == "jfi":
        run_python_command(words, monkeypatch)
    elif words[0] == "pip":
        extras = re.findall(r"\[([\w,]+)\]", command)
        known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
        assert {extra for names in extras for extra in names.split(",")} <= set(known)
        assert set(re.findall(r"jfi-([\d.]+)-", command)) <= {jfi.__version__}
        known = {f"{package}=={release}" for package, release in re.findall(r"([\w-]+)==([\d.]+)", MAKEFILE)}
        for torch, (fbgemm, torchrecs) in LOCKSTEP.items():
            releases = {"torch": [torch], "fbgemm-gpu": [fbgemm], "fbgemm-gpu-cpu": [fbgemm], "torchrec": torchrecs}
            known |= {f"{name}=={'.'.join(x.split('.')[:2])}.*" for name, own in releases.items() for x in own if x}
        assert set(re.findall(r"[\w-]+==[\d.]+\*?", command)) <= known
    elif words[0] in ("ln", "kill"):  # of an operator: a link that is replaced, a signal that the server takes
        assert words[1] in ("-sfn", "-HUP") and len(words) == {"ln": 4, "kill": 3}[words[0]]
    else:
        assert words[0] == "curl", f"no check for {command}"


@pytest.mark.parametrize("page", PAGES)
def test_links_and_paths_exist(page):
    text = re.sub(r"```.*?```", "", TEXTS[page], flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if not link.startswith("http")]
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []
    named = re.findall(r"(?<![\w/<])(?:examples|configs|jfi|benchmarks|tests|docs)/[\w/.-]*[\w/]", TEXTS[page])
    assert [path for path in named if not (ROOT / path).exists() and "artifact" not in path] == []


def test_internals_names_every_folder_and_the_files_that_exist():
    text, root = TEXTS[INTERNALS], ROOT / "jfi"
    folders = [path.parent.relative_to(root) for path in root.glob("*/__init__.py")]
    folders += [path.parent.relative_to(root / "kernels") for path in root.glob("kernels/*/__init__.py")]
    assert [folder for folder in folders if f"`{folder}/`" not in text] == []
    named = {folder for folder in re.findall(r"`([\w/]+)/`", text) if "/" in folder or folder not in map(str, folders)}
    assert [folder for folder in named if not ((root / folder).is_dir() or (ROOT / folder).is_dir())] == []
    files = set(re.findall(r"`([\w/]+\.py)", text))
    known = {path.name for path in root.rglob("*.py")}
    assert [
        file
        for file in files
        if not ((root / file).exists() or (ROOT / file).exists() if "/" in file else file in known)
    ] == []


def test_internals_names_every_class_of_the_core_and_names_that_exist():
    text, core = (
        TEXTS[INTERNALS],
        ["ops", "kernels", "cpu", "tables", "modules", "models", "cuda_graphs", "distributed"],
    )
    sources = {path: path.read_text() for path in (ROOT / "jfi").rglob("*.py")}
    classes = {
        name
        for path, source in sources.items()
        if path.relative_to(ROOT / "jfi").parts[0] in core
        for name in re.findall(r"^class ([A-Z]\w*)", source, flags=re.MULTILINE)
    }
    reference = {
        name for page in TEXTS.values() for name in re.findall(r"^::: [\w.]+\.(\w+)$", page, flags=re.MULTILINE)
    }
    assert classes - set(re.findall(r"\w+", text)) - reference == set()
    tests = [path.read_text() for path in (*(ROOT / "tests/ops").glob("*.py"), ROOT / "tests/test_imports.py")]
    known = set(re.findall(r"\w+", " ".join([*sources.values(), *tests])))
    named = re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`", text)
    assert [name for name in named if not name.endswith((".py", ".md")) and name.split(".")[-1] not in known] == []
    concepts = re.findall(r"^(\d+)\. \*\*", text.split("## Concepts of the core")[1], flags=re.MULTILINE)
    assert [*map(int, concepts)] == [*range(1, len(concepts) + 1)]
    assert len(concepts) <= 45, "a newcomer has enough to learn: replace a concept by the new one"


def test_the_readme_and_the_overview_name_every_page():
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    for text, folder in ((TEXTS["README.md"], "docs/"), (TEXTS["docs/index.md"], "")):
        assert {page for page in pages if f"({folder}{page})" not in text} == set()


def test_the_notes_have_an_index_and_begin_each_section_with_its_conclusion():
    index, *notes = NOTES
    assert re.findall(r"^\|[^|]*\| \[[\w-]+\.md\]\((notes/[\w-]+\.md)\)", TEXTS[index], flags=re.MULTILINE)
    assert [page for page in notes if f"({page.removeprefix('benchmarks/')})" not in TEXTS[index]] == []
    for page in notes:
        sections = re.split(r"(?m)^## ", TEXTS[page])[1:]
        assert sections and [text for text in sections if not text.partition("\n\n")[2].startswith("**")] == [], page


def test_the_readme_names_every_example():
    examples = [path.name for path in (ROOT / "examples").glob("*.py")]
    assert [name for name in examples if name not in TEXTS["README.md"].split("## File tree")[1]] == []


def test_the_readme_trains_on_an_own_table_as_the_page_does():
    command = TEXTS["docs/own-data.md"].split("```sh\n")[1].split("```")[0]
    assert "--data.features" in command
    assert command in TEXTS["README.md"]


def test_the_page_of_settings_is_current():
    page = runpy.run_path(str(ROOT / "docs/site/settings.py"))["page"]
    assert page() == (ROOT / "docs/settings.md").read_text(encoding="utf-8"), "run python docs/site/settings.py"


def test_readme_is_short():
    assert len(TEXTS["README.md"].splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES)
def test_lines_of_prose_have_at_most_120_characters(page):
    prose = re.sub(r"(?ms)^```.*?^```$", lambda block: "\n" * block[0].count("\n"), TEXTS[page])
    long = [i for i, line in enumerate(prose.splitlines(), 1) if len(line) > 120 and not line.startswith("|")]
    assert not long, f"{page}: lines {long}"


@pytest.mark.parametrize("page", readme.PAGES)
def test_tables_are_the_results(page):
    text = TEXTS[page]
    assert "<!-- table: " in text
    assert readme.with_tables(text) == text, "run python -m benchmarks.readme"


def test_the_figure_shows_the_results(tmp_path):
    readme.draw(tmp_path / "speed.png")
    for path in (readme.FIGURE, tmp_path / "speed.png"):
        assert readme.drawn_from().encode() in path.read_bytes(), "run python -m benchmarks.readme"


def test_site_has_every_page_and_every_name():
    def pages(nav) -> list[str]:
        if isinstance(nav, str):
            return [nav]
        return [page for part in (nav if isinstance(nav, list) else nav.values()) for page in pages(part)]

    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    expected = {page.removeprefix("docs/") for page in PAGES} - {"README.md", *NOTES}
    assert set(pages(config["nav"])) == expected
    assert config["not_in_nav"].split() == [
        "benchmarks/NOTES.md",
        "benchmarks/notes/*.md",
        "benchmarks/results/compile/*.md",
    ]
    names = [name for text in TEXTS.values() for name in re.findall(r"^::: ([\w.]+)$", text, flags=re.MULTILINE)]
    assert names
    for name in names:
        module, _, attribute = name.rpartition(".")
        try:
            owner = importlib.import_module(module)
        except ModuleNotFoundError:
            owner = None
        assert hasattr(owner, attribute), name
        # mkdocs --strict refuses several parameters in one entry.
        assert not re.search(r"^ +[a-z]\w*(, \w+)+: ", getattr(owner, attribute).__doc__ or "", flags=re.MULTILINE), (
            name
        )


def test_the_options_of_the_server_are_those_of_the_command():
    known = set(re.findall(r"^ +(--[\w-]+)", options.serve().format_help(), flags=re.MULTILINE))
    listed = set(re.findall(r"^\| `(--[\w-]+)`", TEXTS["docs/serving.md"], flags=re.MULTILINE))
    assert listed == known - {"--artifact"}


@pytest.mark.parametrize(
    ("module", "page"),
    [
        ("jfi.ops", "operators"),
        ("jfi.table1", "operators"),
        ("jfi.modules", "modules"),
        ("jfi.models", "modules"),
        ("jfi.semantic_ids", "semantic_ids"),
        ("jfi.history_policies", "dynamic_histories"),
        ("jfi.distributed", "distributed"),
    ],
)
def test_every_public_name_is_on_its_page(module, page):
    shown = set(re.findall(r"^::: ([\w.]+)$", TEXTS[f"docs/{page}.md"], flags=re.MULTILINE))
    names = importlib.import_module(module).__all__
    assert [name for name in names if not shown & {f"{module}.{name}", f"{module}.{name}.{name}"}] == []


def test_plain_english():
    words = r"\b(processors?|multiprocessors?|matrix units?|copy engine|artefacts?|optimisers?|his|dealt|taken whole)\b"
    code = [
        *(ROOT / "jfi").rglob("*.py"),
        *(ROOT / "benchmarks").glob("*.py"),
        ROOT / "Makefile",
        ROOT / "pyproject.toml",
    ]
    prose = {page: re.sub(r"<!-- table: .*?<!-- end -->", "", text, flags=re.DOTALL) for page, text in TEXTS.items()}
    # Python's function and the key of the results' files.
    prose |= {
        path.relative_to(ROOT).as_posix(): re.sub(r'platform\.processor|"processor"', "", path.read_text())
        for path in code
    }
    found = {page: re.findall(words, text, flags=re.IGNORECASE) for page, text in prose.items()}
    assert {page: hits for page, hits in found.items() if hits} == {}


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path):
    build = pytest.importorskip("mkdocs.commands.build")
    config = importlib.import_module("mkdocs.config")
    build.build(config.load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path / "site")))
    assert (tmp_path / "site/operators.html").exists()
