"""Brings files outside of docs/ into the site, at their repository path, and rewrites the links between all of them.

So one relative link works in the repository's own view and in the site.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
ADDED = ["CONTRIBUTING.md", "benchmarks/README.md", "benchmarks/NOTES.md", "benchmarks/notes/*.md"]
ADDED += ["benchmarks/results/*/*.png", "benchmarks/results/cpu/mutation.json", "benchmarks/results/compile/*.md"]


def on_files(files, config):
    for pattern in ADDED:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    source = page.file.src_uri
    if source.startswith(("benchmarks/NOTES", "benchmarks/notes/")):
        page.meta["search"] = {"exclude": True}
    folder = posixpath.dirname(source if source in _added() else f"docs/{source}")

    def rewrite(link):
        target, anchor = link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        path = "docs/index.md" if path == "README.md" else path  # the site's front page takes the README's place
        path = posixpath.relpath(path.removeprefix("docs/"), posixpath.dirname(source) or ".")
        return f"{link[1]}({path}{anchor})"

    return re.sub(r"(\[[^\]]*\])\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)", rewrite, markdown)


def _added():
    return {path.relative_to(ROOT).as_posix() for pattern in ADDED for path in ROOT.glob(pattern)}
