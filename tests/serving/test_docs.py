"""What docs/serving.md shows is so."""

import json
import re

import pytest

from .conftest import ROOT, load_script

TEXT = (ROOT / "docs/serving.md").read_text()


def test_the_request_that_it_shows_is_answered(scorer):
    (body,) = re.findall(r"--data '(\{.*?\})'", TEXT, flags=re.DOTALL)
    assert len(scorer.score([scorer.reader(json.loads(body))])[0]) == 2


@pytest.mark.parametrize("name", ["export", "serve"])
def test_the_options_that_it_names_are_those_of_the_commands(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit):
        load_script(name).arguments()
    known = set(re.findall(r"^ +(--[\w-]+)", capsys.readouterr().out, flags=re.MULTILINE))
    shown = " ".join(re.findall(rf"examples/{name}\.py ([^#<\n]*)", TEXT))
    assert shown and set(re.findall(r"--[\w-]+", shown)) <= known
    if name == "serve":
        listed = set(re.findall(r"^\| `(--[\w-]+)`", TEXT, flags=re.MULTILINE))
        assert listed == known - {"--artifact"}
