"""Reads the YAML of configs: a document that is too large or has a key twice is refused."""

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
    return _Loader(text, source).get_single_node()


class _Loader(yaml.SafeLoader):
    """Makes the nodes of a document, and refuses it at the first one that no config has.

    Args:
        text: the document.
        source: names it in messages.
    """

    def __init__(self, text: str, source: str) -> None:
        super().__init__(text)
        self._source, self._depth = source, 0
        #: By the id of a node how many values it stands for; an alias stands for all of its anchor's.
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        """Returns the next node with all nodes in it."""
        is_alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ConfigError(f"{self._source}: nested over {_DEEPEST} deep, which no config is")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if not is_alias:
            if node.tag not in _TAGS:
                what = f"the tag {node.tag!r} is not known"
                raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)
            parts = node.value if isinstance(node, yaml.CollectionNode) else []
            if isinstance(node, yaml.MappingNode):
                self._check_keys(node)
                parts = [part for pair in parts for part in pair]
            self._sizes[id(node)] = 1 + sum(self._sizes[id(part)] for part in parts)
        # An alias of what is around it has no end.
        if max(self._sizes.get(id(node), _MOST_VALUES + 1), len(self._sizes)) > _MOST_VALUES:
            raise ConfigError(f"{self._source}: over {_MOST_VALUES:,} values, which no config is")
        return node

    def _check_keys(self, mapping: yaml.MappingNode) -> None:
        lines: dict[tuple[str, object], int] = {}
        for key, _ in mapping.value:
            name, line = (key.tag, str(key.value)), key.start_mark.line + 1
            if name in lines:
                first = f"first in line {lines[name]}"
                raise ConfigError(f"{self._source}:{line}: the key {key.value} is there twice, {first}")
            lines[name] = line
