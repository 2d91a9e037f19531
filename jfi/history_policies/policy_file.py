"""The file of a policy: JSON that a person can read and edit."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from jfi.history_policies.reports import SegmentReport, SurfaceReport
from jfi.history_policies.segments import STATISTICS, Segments
from jfi.utils.files import DamagedFileError, reading_file, write_file
from jfi.utils.suggest import suggest

_FORMAT = "jfi history policy 1"


def write_policy(path: Path, policy: Any) -> None:
    """Writes a policy, whole or not at all."""
    write_file(path, _text(as_tree(policy), "\n") + "\n")


def read_policy(path: Path, kind: type) -> Any:
    """The policy, of type `kind`, that `write_policy` wrote.

    Raises:
        DamagedFileError: the file is missing, or is no policy; one line that names it.
    """
    with reading_file(path, DamagedFileError):
        content = path.read_bytes()
    try:
        tree = json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path}: not JSON ({error})") from None
    if not isinstance(tree, dict) or tree.get("format") != _FORMAT:
        raise DamagedFileError(f"{path}: not a policy of this version of jfi (its 'format' must be '{_FORMAT}')")
    try:
        return kind(**_parse(tree))
    except KeyError as error:
        raise DamagedFileError(f"{path}: no {error}") from None
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise DamagedFileError(f"{path}: {error}") from None


def as_tree(policy: Any) -> dict[str, Any]:
    """A policy as what JSON has: dicts, lists, texts and numbers."""
    return {
        "format": _FORMAT,
        "newest": policy.newest,
        "notes": list(policy.notes),
        "segments": {
            "statistics": list(STATISTICS),
            "mean": list(policy.segments.mean),
            "scale": list(policy.segments.scale),
            "centers": dict(zip(policy.segments.names, map(list, policy.segments.centers), strict=True)),
            "silhouettes": {str(k): value for k, value in policy.silhouettes.items()},
            "agreement": policy.agreement,
            "agreement_by_chance": policy.agreement_by_chance,
            "reports": [asdict(one) for one in policy.segment_reports],
        },
        "edges": dict(zip(policy.surfaces, map(list, policy.edges), strict=True)),
        "surfaces": [asdict(one) for one in policy.surface_reports],
    }


def _text(value: Any, line: str) -> str:
    """JSON, indented but for lists of numbers and texts; `line` is a line break and the indentation."""
    inner = line + " "
    if isinstance(value, dict) and value:
        parts = [f"{json.dumps(name, ensure_ascii=False)}: {_text(one, inner)}" for name, one in value.items()]
        return f"{{{inner}{f',{inner}'.join(parts)}{line}}}"
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        return f"[{inner}{f',{inner}'.join(_text(one, inner) for one in value)}{line}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _parse(tree: dict) -> dict[str, Any]:
    """The arguments of a policy."""
    segments, edges = (_typed(name, tree[name], dict) for name in ("segments", "edges"))
    if segments["statistics"] != list(STATISTICS):
        raise ValueError(f"statistics must be {list(STATISTICS)}, got {segments['statistics']}")
    centers = _typed("centers", segments["centers"], dict)
    names = tuple(centers)
    numbers = tuple(_numbers(f"center of '{name}'", centers[name]) for name in names)
    mean, scale = (_numbers(name, segments[name]) for name in ("mean", "scale"))
    if not all(one > 0 for one in scale):
        raise ValueError(f"scale must be above 0, got {list(scale)}")
    return dict(
        surfaces=tuple(edges),
        edges=tuple(_numbers(f"edges of '{name}'", of) for name, of in edges.items()),
        newest=_typed("newest", tree["newest"], int),
        segments=Segments(names, mean, scale, numbers),
        segment_reports=tuple(_record(SegmentReport, one) for one in _typed("reports", segments["reports"], list)),
        surface_reports=tuple(_record(SurfaceReport, one) for one in _typed("surfaces", tree["surfaces"], list)),
        silhouettes={int(k): _share(v) for k, v in _typed("silhouettes", segments["silhouettes"], dict).items()},
        agreement=_share(segments["agreement"]),
        agreement_by_chance=_share(segments["agreement_by_chance"]),
        notes=tuple(_typed("a note", one, str) for one in _typed("notes", tree["notes"], list)),
    )


def _record(kind: type, tree: dict) -> Any:
    """A report of a JSON object; every field must be there with its type."""
    what = "surfaces" if kind is SurfaceReport else "reports"
    parts, tree = {}, _typed(f"an entry of {what}", tree, dict)
    for field in fields(kind):
        value, what = tree[field.name], f"{field.name} in {kind.__name__}"
        expected = str(field.type)
        if "tuple" in expected:
            inner = bool if "bool" in expected else int if "int" in expected else float
            parts[field.name] = tuple(_typed(what, one, inner) for one in _typed(what, value, list))
        elif value is None and "None" in expected:
            parts[field.name] = None
        else:
            plain = next(one for one in (bool, int, float, str) if one.__name__ in expected)
            parts[field.name] = _typed(what, value, plain)
    if unknown := [name for name in tree if name not in parts]:
        raise ValueError(f"unknown '{unknown[0]}' in {kind.__name__}; {suggest(unknown[0], parts)}")
    return kind(**parts)


def _share(value: Any) -> float | None:
    return None if value is None else _typed("a share of the segments", value, float)


def _numbers(what: str, values: Any) -> tuple[float, ...]:
    return tuple(_typed(what, one, float) for one in _typed(what, values, list))


def _typed(what: str, value: Any, kind: type) -> Any:
    """The value, of this type; a whole number may stand for a float."""
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        names = {dict: "an object", list: "a list"}
        raise TypeError(f"{what} must be {names.get(kind, kind.__name__)}, got {value!r}")
    return value
