"""Single faults for the mutation trial (mutation_trial.py): where they are, what they are, how they are drawn.

A fault replaces one expression or statement of a file. No faults by construction, and left out: docstrings, texts (but
"left" and "right" change places), annotations, what a `raise`, a warning or a log line says, `__repr__`, sums of texts
and swapped arguments that could only fail at once, zip's `strict`, a dataclass's `frozen`, `PERFORMANCE` and
the looks of pictures (`LOOKS`).
"""

import ast
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDERS = ("data", "events", "training", "follow", "modules", "cpu", "serving", "distributed", "tables")
FOLDERS += ("history_policies", "semantic_ids", "baselines")
#: Sizes of blocks and switches between two ways to the same result. Any value is right; tests set small ones.
PERFORMANCE = {
    *("_BLOCK", "BLOCK", "_LARGE", "_MAX_THREADS"),
    *("BATCH_ELEMENTS", "PADDED_SCORES", "EXPANDED_ELEMENTS", "COPIED_ELEMENTS", "BLOCK_QUERIES", "_SMALL_WORK"),
}
#: Numbers and options in these files are sizes, colours and paddings.
LOOKS = {"jfi/training/run/plots.py"}
_SPOKEN = {"warn", "warning", "info", "debug", "error", "exception", "print", "echo"}
_UNCHANGED = {"strict", "frozen"}
_UNSWAPPED = {"isinstance", "issubclass", "getattr", "setattr", "hasattr", "open", "fromtimestamp", "all_reduce"}
_COMPARE = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
_ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}
_SIDES = {"left": "right", "right": "left"}


@dataclass(frozen=True)
class Mutant:
    """A fault: characters `start:end` of the file become `new`.

    `lines` are those of the statement around it, of the function for a default, and none for what runs on import.
    """

    path: str
    line: int
    kind: str
    start: int
    end: int
    old: str
    new: str
    lines: tuple[int, ...]

    def apply(self, source: str) -> str:
        assert source[self.start : self.end] == self.old
        return source[: self.start] + self.new + source[self.end :]

    def describe(self) -> dict[str, object]:
        told = asdict(self)
        return {key: told[key] for key in ("path", "line", "kind", "old", "new")}


class _Finder(ast.NodeVisitor):
    """The faults of a file."""

    def __init__(self, path: str, source: str) -> None:
        self.path, self.source, self.found = path, source, []
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._lines: tuple[int, ...] = ()
        self._depth = 0
        self._text = source.splitlines()

    def _offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._text[line - 1].encode()[:column].decode())

    def _add(self, node: ast.AST, kind: str, new: str) -> None:
        start, end = self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)
        old = self.source[start:end]
        if new != old:
            self.found.append(Mutant(self.path, node.lineno, kind, start, end, old, new, self._lines))

    def _replace(self, node: ast.AST, kind: str, **changes: object) -> None:
        """`node` with other attributes, in brackets if it is an operation."""
        fields = {name: changes.get(name, getattr(node, name, None)) for name in node._fields}
        new = ast.unparse(ast.copy_location(type(node)(**fields), node))
        self._add(node, kind, f"({new})" if isinstance(node, (ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp)) else new)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if isinstance(body, list) else node.end_lineno
            self._lines = tuple(range(node.lineno, max(last, node.lineno) + 1)) if self._depth else ()
        if isinstance(node, ast.Raise):
            self._add(node, "raise deleted", "pass")
        elif not self._is_no_fault(node):
            super().visit(node)

    def _is_no_fault(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return True  # a docstring
        if isinstance(node, ast.Call):
            return self._name(node) in _SPOKEN
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        return any(isinstance(target, ast.Name) and target.id in PERFORMANCE for target in targets)

    @staticmethod
    def _name(node: ast.Call) -> str:
        return getattr(node.func, "attr", getattr(node.func, "id", ""))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name == "__repr__":
            return
        self._lines = tuple(range(node.body[0].lineno, node.end_lineno + 1))
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        self._depth += 1
        for statement in node.body:
            self.visit(statement)
        self._depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, ast.Subscript) for target in node.targets):
            self._add(node, "statement deleted", "pass")
        if all(isinstance(target, ast.Name) and target.id[0].isupper() for target in node.targets):
            if not isinstance(node.value, ast.BinOp) or not isinstance(node.value.op, ast.BitOr):
                self.visit(node.value)
            return  # A | B is a name of types
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add(node, "statement deleted", "pass")
        if type(node.op) in _ARITHMETIC:
            self._replace(node, "arithmetic", op=_ARITHMETIC[type(node.op)]())
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and self._name(node.value) not in _SPOKEN:
            self._add(node, "statement deleted", "pass")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._add(node, "return value", "return None")
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._add(node, "loop", "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add(node, "loop", "pass")

    def visit_If(self, node: ast.If) -> None:
        if getattr(node.test, "id", "") == "TYPE_CHECKING":
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._replace(node, "condition", body=node.orelse, orelse=node.body)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        if not isinstance(test, (ast.Compare, ast.UnaryOp)) or (isinstance(test, ast.Compare) and len(test.ops) > 1):
            self._add(test, "condition", f"(not ({ast.unparse(test)}))")

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._add(test, "condition", "True")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for number, op in enumerate(node.ops):
            for other in _COMPARE[type(op)]:
                self._replace(node, "comparison", ops=[*node.ops[:number], other(), *node.ops[number + 1 :]])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._replace(node, "and, or", op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self._add(node, "negation", f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = (ast.JoinedStr, ast.List, ast.Tuple)
        sides = (node.left, node.right)
        is_text = any(isinstance(s, texts) or isinstance(getattr(s, "value", None), (str, bytes)) for s in sides)
        if type(node.op) in _ARITHMETIC and not is_text:
            self._replace(node, "arithmetic", op=_ARITHMETIC[type(node.op)]())
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, "constant", str(not node.value))
        elif self.path in LOOKS:
            return
        elif isinstance(node.value, int):
            self._add(node, "constant", str(node.value + 1))
            if node.value > 0:
                self._add(node, "constant", str(node.value - 1))
        elif isinstance(node.value, float):
            self._add(node, "constant", str(node.value * 1.1 or 0.1))
        elif node.value in _SIDES:
            self._add(node, "constant", f'"{_SIDES[node.value]}"')

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Slice(self, node: ast.Slice) -> None:
        for side in ("lower", "upper"):
            if getattr(node, side) is not None:
                self._replace(node, "slice", **{side: None})
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = self._name(node)
        fixed = any(isinstance(argument, (ast.Starred, ast.Constant, ast.Lambda)) for argument in node.args[:2])
        if len(node.args) > 1 and not fixed and name not in _UNSWAPPED:
            self._replace(node, "arguments swapped", args=[node.args[1], node.args[0], *node.args[2:]])
        for number, keyword in enumerate(node.keywords):
            if self.path not in LOOKS and keyword.arg not in {None, *_UNCHANGED}:
                rest = [*node.keywords[:number], *node.keywords[number + 1 :]]
                self._replace(node, f"argument dropped: {keyword.arg}", keywords=rest)
        if name in _NAMES and isinstance(node.func, ast.Name):
            self._replace(node, "function", func=ast.Name(_NAMES[name]))
        elif name in _NAMES:
            self._replace(node, "function", func=ast.Attribute(node.func.value, _NAMES[name]))
        self.visit(node.func)
        for argument in [*node.args, *node.keywords]:
            if getattr(argument, "arg", "") not in _UNCHANGED:
                self.visit(argument)


def find_mutants(path: str, source: str) -> list[Mutant]:
    """Every fault of a file."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return finder.found


def draw(root: Path, count: int, seed: int, least: int) -> list[Mutant]:
    """`count` faults, shared among `FOLDERS` by their lines, at least `least` each, no two on one line."""
    generator = random.Random(seed)
    files = {folder: sorted((root / "jfi" / folder).rglob("*.py")) for folder in FOLDERS}
    lines = {folder: sum(len(file.read_text().splitlines()) for file in files[folder]) for folder in FOLDERS}
    shares = {folder: max(least, round(count * lines[folder] / sum(lines.values()))) for folder in FOLDERS}
    shares[max(shares, key=shares.__getitem__)] += count - sum(shares.values())
    return [mutant for folder in FOLDERS for mutant in _draw(root, files[folder], shares[folder], generator)]


def _draw(root: Path, files: list[Path], count: int, generator: random.Random) -> Iterator[Mutant]:
    mutants = [m for file in files for m in find_mutants(str(file.relative_to(root)), file.read_text())]
    generator.shuffle(mutants)
    used: set[tuple[str, int]] = set()
    for mutant in mutants:
        if len(used) < count and (mutant.path, mutant.line) not in used:
            used.add((mutant.path, mutant.line))
            yield mutant
