"""Reads the YAML of configs: a document that is too large or has a key twice is refused."""

from collections.abc import Iterator

import yaml

from jfi.training.config import ConfigError

#: Of a YAML file or value.
_DEEPEST, _MOST_VALUES = 50, 100_000
_TAGS = {*yaml.SafeLoader.yaml_constructors, "tag:yaml.org,2002:merge", "tag:yaml.org,2002:value"}


def read_yaml(text: str, source: str) -> yaml.Node | None:
    """Returns the tree of a YAML document, None for an empty one.

    Raises:
        ConfigError: it is too deep or too large to be a config, or a mapping has a key twice.
        yaml.YAMLError: it is not YAML, or has a tag of another language, such as `!!python/name`.
    """
    _check_size(text, source)
    root = yaml.compose(text, yaml.SafeLoader)
    for node in _nodes(root):
        if node.tag not in _TAGS:
            raise yaml.constructor.ConstructorError(None, None, f"the tag {node.tag!r} is not known", node.start_mark)
        lines: dict[tuple[str, object], int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            name, line = (key.tag, str(key.value)), key.start_mark.line + 1
            if name in lines:
                raise ConfigError(f"{source}:{line}: the key {key.value} is there twice, first in line {lines[name]}")
            lines[name] = line
    return root


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


def _check_size(text: str, source: str) -> None:
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
            # An alias of what is around it has no end; one of an anchor that is not there is a fault of `yaml.compose`.
            counts[-1] += _MOST_VALUES if event.anchor in anchors else sizes.get(event.anchor, 0)
        elif isinstance(event, yaml.ScalarEvent):
            counts[-1] += 1
            sizes[event.anchor] = 1
        if len(counts) > _DEEPEST or counts[-1] > _MOST_VALUES:
            what = f"nested over {_DEEPEST} deep" if len(counts) > _DEEPEST else f"over {_MOST_VALUES:,} values"
            raise ConfigError(f"{source}: {what}, which no config is")
