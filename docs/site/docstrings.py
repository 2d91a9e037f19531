"""Reads a docstring's section `Example:` as griffe's `Examples:`, so that its prompts are shown as code."""

import re

import griffe


class ExampleSections(griffe.Extension):
    def on_object(self, *, obj, **kwargs):
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^( *)Example::?$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
