"""The requests that docs/serving.md shows are answered alike; tests/test_docs.py checks the rest of the page."""

import re

from .conftest import ROOT


def test_the_requests_that_it_shows_are_answered_alike(scorer):
    text = (ROOT / "docs/serving.md").read_text()
    (body,) = re.findall(r"--data '(\{.*?\})'", text, flags=re.DOTALL)
    by_rows = re.search(r"```json\n(\{\s+\"user\": \{\},.*?\})\n```", text, flags=re.DOTALL)[1]
    one, other = scorer.score([scorer.reader.read(found.encode()) for found in (body, by_rows)])
    assert one == other and len(one) == 2
