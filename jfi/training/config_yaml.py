"""Reads the YAML of configs: a document that is too large or has a key twice is refused, and texts stay texts."""

import dataclasses
import secrets
import typing
from collections.abc import Iterator

import yaml

from jfi.training.config import ConfigError

#: Of a YAML file or value.
_DEEPEST, _MOST_VALUES = 50, 100_000
_KINDS = {"null": type(None), "bool": bool, "int": int, "float": float}


def read_yaml(text: str, place: str) -> yaml.Node | None:
    """Returns the tree of a YAML document, None for an empty one.

    Raises:
        ConfigError: it is too deep or too large to be a config, or a mapping has a key twice.
        yaml.YAMLError: it is not YAML.
    """
    _check_size(text, place)
    root = yaml.compose(text, yaml.SafeLoader)
    for node in _nodes(root):
        lines: dict[tuple[str, object], int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            name, line = (key.tag, str(key.value)), key.start_mark.line + 1
            if name in lines:
                raise ConfigError(f"{place}:{line}: the key {key.value} is there twice, first in line {lines[name]}")
            lines[name] = line
    return root


def scalars(root: yaml.Node | None) -> set[str]:
    """Returns the texts of all scalars of a tree."""
    return {node.value for node in _nodes(root) if isinstance(node, yaml.ScalarNode)}


def _nodes(root: yaml.Node | None) -> Iterator[yaml.Node]:
    """Yields each node of a tree once."""
    left, seen = [root] if root is not None else [], set()
    while left:
        node = left.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, yaml.MappingNode):
            left += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            left += node.value


def _check_size(text: str, place: str) -> None:
    """Raises ConfigError for YAML that is too deep or too large to be a config, before objects are built of it.

    The parser's events are counted, which takes no recursion; an alias counts as all that it stands for.
    """
    sizes: dict[str, int] = {}  # by anchor
    counts, anchors = [0], [None]  # of the collections that are open
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, (yaml.SequenceStartEvent, yaml.MappingStartEvent)):
            counts.append(1)
            anchors.append(event.anchor)
        elif isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent)):
            size, anchor = counts.pop(), anchors.pop()
            counts[-1] += size
            sizes[anchor] = size
        elif isinstance(event, yaml.AliasEvent):
            counts[-1] += sizes.get(event.anchor, _MOST_VALUES)  # an alias of what is around it has no end
        elif isinstance(event, yaml.ScalarEvent):
            counts[-1] += 1
            sizes[event.anchor] = 1
        if len(counts) > _DEEPEST or counts[-1] > _MOST_VALUES:
            what = f"nested over {_DEEPEST} deep" if len(counts) > _DEEPEST else f"over {_MOST_VALUES:,} values"
            raise ConfigError(f"{place}: {what}, which no config is")


class StandIns:
    """Words that stand for texts while jsonargparse reads them: it reads a text as YAML again, so "null" is None there.

    Example:
        >>> stand_ins, root = StandIns(), read_yaml("{label: 'null', missing: [NULL, no]}", "config.yaml")
        >>> for (_, node), hint in zip(root.value, (str | None, list[str])):
        ...     stand_ins.replace(node, hint)
        >>> tree = yaml.safe_load(yaml.serialize(root))
        >>> tree["label"] == "null", stand_ins.restore(tree)
        (False, {'label': 'null', 'missing': ['NULL', 'no']})
    """

    def __init__(self) -> None:
        self._prefix = f"text-{secrets.token_hex(8)}-"  # which no text has
        self._texts: dict[str, str] = {}

    def add(self, text: str) -> str:
        """Returns a word that stands for a text, or the text if it is read as itself."""
        try:
            is_safe = len(text) < 1000 and yaml.safe_load(text) == text and not _is_number(text)
        except (yaml.YAMLError, ValueError, RecursionError):
            is_safe = False
        if is_safe:
            return text
        word = f"{self._prefix}{len(self._texts):06d}"
        self._texts[word] = text
        return word

    def replace(self, node: yaml.Node, hint: object) -> None:
        """Replaces the texts of a tree, in place; a value whose type takes no other kind is the text that is written.

        Args:
            node: of the tree.
            hint: the type of its value.
        """
        kinds = typing.get_args(hint) if typing.get_origin(hint) not in (None, list, dict) else (hint,)
        if isinstance(node, yaml.ScalarNode):
            found = _KINDS.get(node.tag.rpartition(":")[2], str)
            is_kept = found in kinds or (found is int and float in kinds)
            if found is str and node.style is None and float in kinds and _is_number(node.value):
                return  # 1e-3, which YAML takes for a text
            if str in kinds and (found is str or not is_kept):
                node.tag, node.value = "tag:yaml.org,2002:str", self.add(node.value)
            return
        for kind in kinds:
            inner = typing.get_args(kind)[-1:]
            if isinstance(node, yaml.SequenceNode) and typing.get_origin(kind) is list:
                for value in node.value:
                    self.replace(value, inner[0])
            elif isinstance(node, yaml.MappingNode) and (dataclasses.is_dataclass(kind) or inner):
                hints = typing.get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}
                for key, value in node.value:
                    merged = value.value if isinstance(value, yaml.SequenceNode) else [value]
                    if key.value == "<<":
                        for one in merged:
                            self.replace(one, kind)
                    else:
                        self.replace(value, hints.get(key.value) if hints else inner[0])

    def restore(self, value: typing.Any) -> typing.Any:
        """Returns a value of a config, or the whole, or a message, with the texts."""
        if not self._texts:
            return value
        if isinstance(value, str):
            for word, text in self._texts.items():
                value = value.replace(word, text)
        elif isinstance(value, list):
            return [self.restore(one) for one in value]
        elif isinstance(value, dict):
            return {name: self.restore(one) for name, one in value.items()}
        elif dataclasses.is_dataclass(value):
            own = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
            return dataclasses.replace(value, **self.restore(own))
        return value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
