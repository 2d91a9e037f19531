"""Names of modules for columns and keys, which may be called like attributes of a module, such as "type" or "items"."""

from torch import nn

_MODULES = nn.ModuleDict()


def module_name(name: str) -> str:
    """Returns the name itself if a module in an nn.ModuleDict can have it, else an escaped one of its own.

    >>> module_name("genre"), module_name("type"), module_name("a.b")
    ('genre', '%type', 'a%2Eb')
    """
    escaped = name.replace("%", "%25").replace(".", "%2E")
    return f"%{escaped}" if hasattr(_MODULES, escaped) else escaped
