"""The request that docs/serving.md shows is answered; tests/test_docs.py checks the rest of the page."""

import json
import re

from .conftest import ROOT


def test_the_request_that_it_shows_is_answered(scorer):
    text = (ROOT / "docs/serving.md").read_text()
    (body,) = re.findall(r"--data '(\{.*?\})'", text, flags=re.DOTALL)
    assert len(scorer.score([scorer.reader(json.loads(body))])[0]) == 2
