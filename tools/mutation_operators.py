"""Small wrong changes to a Python module: one place each, as the text of the whole changed module.

Each change replaces the text of one node, so that a diff shows nothing else. What cannot change
behaviour (docstrings, annotations, messages of errors) and what nobody could miss (a name that is no longer
bound) is left out.
"""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass

BOUNDARY: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip
OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
SWAPPED_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A module with one change.

    Attributes:
        function: qualified name of the function or class changed; "" at module level.
        line: first line of the place.
        operator: kind of change.
        source: text of the changed module.
    """

    function: str
    line: int
    operator: str
    source: str


def mutants_of(source: str) -> list[Mutant]:
    """Every mutant of a module, in the order of its text, each changed module once."""
    found: list[Mutant] = []
    original = ast.dump(ast.parse(source))
    seen = {original}
    walker = _Walker(source)
    walker.visit(ast.parse(source))
    for function, node, operator, text in sorted(
        walker.changes, key=lambda c: (c[1].lineno, c[1].col_offset)
    ):
        changed = _replaced(source, node, text)
        try:
            shape = ast.dump(ast.parse(changed))
        except SyntaxError:
            continue
        if shape not in seen:
            seen.add(shape)
            found.append(Mutant(function, node.lineno, operator, changed))
    return found


def _replaced(source: str, node: ast.expr | ast.stmt, text: str) -> str:
    lines = source.splitlines(keepends=True)
    assert node.end_lineno is not None and node.end_col_offset is not None
    first, last = lines[node.lineno - 1].encode(), lines[node.end_lineno - 1].encode()
    head, tail = first[: node.col_offset].decode(), last[node.end_col_offset :].decode()
    return "".join([*lines[: node.lineno - 1], head, text, tail, *lines[node.end_lineno :]])


class _Walker(ast.NodeVisitor):
    """Collects (function, node, operator, new text of the node)."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.changes: list[tuple[str, ast.expr | ast.stmt, str, str]] = []
        self._scope: list[str] = []
        self._returns: list[str] = []
        self._bound: list[set[str]] = [set()]

    # -- helpers -------------------------------------------------------------------------------

    def _change(self, node: ast.expr | ast.stmt, operator: str, new: ast.AST | str) -> None:
        text = new if isinstance(new, str) else ast.unparse(new)
        if isinstance(node, ast.expr):
            text = f"({text})"
        self.changes.append((".".join(self._scope), node, operator, text))

    def _changed_copy(self, node: ast.expr, operator: str, **fields: object) -> None:
        new = copy.copy(node)
        for name, value in fields.items():
            setattr(new, name, value)
        self._change(node, operator, new)

    def _negate(self, test: ast.expr) -> None:
        """A comparison and a `not` are negated where they are visited."""
        is_own = isinstance(test, ast.Compare) and len(test.ops) == 1
        if not is_own and not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            self._change(test, "negated condition", ast.UnaryOp(ast.Not(), test))

    def _drop_block(self, body: list[ast.stmt], operator: str) -> None:
        """Put nothing in the place of a branch."""
        first, last = body[0], body[-1]
        span = ast.Pass(
            lineno=first.lineno,
            col_offset=first.col_offset,
            end_lineno=last.end_lineno,
            end_col_offset=last.end_col_offset,
        )
        self._change(span, operator, "pass")

    # -- scopes --------------------------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._scope.append(node.name)
        arguments = node.args
        names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        self._bound.append(names)
        self._returns.append(ast.unparse(node.returns) if node.returns is not None else "")
        for default in (*arguments.defaults, *arguments.kw_defaults):
            if default is not None:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self._returns.pop()
        self._bound.pop()
        self._scope.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scope.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._scope.pop()

    # -- statements ----------------------------------------------------------------------------

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring
        self._change(node, "dropped statement", "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if any(name == "__slots__" for name in names) or _is_alias(node.value):
            return
        if self._scope[-1:] == ["__init__"]:
            pass  # an attribute that is missing from the start fails at once
        elif len(names) < len(node.targets) or all(name in self._bound[-1] for name in names):
            if not any(isinstance(target, ast.Tuple) for target in node.targets):
                self._change(node, "dropped statement", "pass")
        self._bound[-1].update(names)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is None:
            return
        if isinstance(node.target, ast.Name):
            self._bound[-1].add(node.target.id)
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._change(node, "dropped statement", "pass")
        other = ARITHMETIC.get(type(node.op))
        if other is not None:
            self._change(node, "arithmetic", ast.AugAssign(node.target, other(), node.value))
        self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._change(node, "dropped statement", "pass")

    def visit_Raise(self, node: ast.Raise) -> None:
        self._change(node, "dropped statement", "pass")  # what the error says is no behaviour

    def visit_Assert(self, node: ast.Assert) -> None:
        return

    def visit_Break(self, node: ast.Break) -> None:
        self._change(node, "dropped statement", "pass")
        self._change(node, "break and continue", "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._change(node, "dropped statement", "pass")
        self._change(node, "break and continue", "break")

    def visit_Return(self, node: ast.Return) -> None:
        self._change(node, "dropped statement", "pass")
        value = node.value
        if value is None:
            return
        returns = self._returns[-1]
        wrong = {"int": ["0", "{} + 1"], "float": ["0.0", "{} + 1.0"], "bool": ["not {}"]}.get(returns)
        if wrong is None:
            wrong = ["[]"] if returns.startswith("list") else ["None"]
        text = f"({ast.unparse(value)})"
        for template in wrong:
            self._change(node, "returned value", f"return {template.format(text)}")
        self.visit(value)

    def visit_If(self, node: ast.If) -> None:
        self._negate(node.test)
        self._drop_block(node.body, "deleted branch")
        if node.orelse and not isinstance(node.orelse[0], ast.If):
            self._drop_block(node.orelse, "deleted branch")
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self._change(node.test, "loop never entered", "False")
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._change(node.iter, "loop never entered", "()")
        self._bind(node.target)
        self.generic_visit(node)

    def _bind(self, target: ast.expr) -> None:
        self._bound[-1].update(n.id for n in ast.walk(target) if isinstance(n, ast.Name))

    # -- expressions ---------------------------------------------------------------------------

    def visit_Compare(self, node: ast.Compare) -> None:
        for index, op in enumerate(node.ops):
            for table, operator in ((BOUNDARY, "boundary"), (OPPOSITE, "comparison")):
                other = table.get(type(op))
                if other is not None:
                    ops = [*node.ops[:index], other(), *node.ops[index + 1 :]]
                    self._changed_copy(node, operator, ops=ops)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = ARITHMETIC.get(type(node.op))
        if other is not None and not _is_alias(node):
            self._changed_copy(node, "arithmetic", op=other())
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._change(node, "dropped not", node.operand)
        elif isinstance(node.op, ast.USub):
            if isinstance(node.operand, ast.Constant) and isinstance(node.operand.value, int | float):
                self._numbers(node, -node.operand.value)
                return
            self._change(node, "arithmetic", node.operand)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other: ast.boolop = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._changed_copy(node, "boolean operator", op=other)
        for index in range(len(node.values)):
            rest = [*node.values[:index], *node.values[index + 1 :]]
            new = rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
            self._change(node, "dropped clause", new)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self._change(node, "deleted branch", node.body)
        self._change(node, "deleted branch", node.orelse)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negate(test)
            self._change(test, "dropped filter", "True")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._change(node, "constant", str(not value))
        elif isinstance(value, int | float):
            self._numbers(node, value)

    def _numbers(self, node: ast.expr, value: int | float) -> None:
        for other in (value + 1, value - 1):
            self._change(node, "constant", repr(other))

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name):
            swapped = SWAPPED_CALLS.get(node.func.id)
            if swapped is not None:
                self._changed_copy(node, "swapped call", func=ast.Name(swapped))
            elif node.func.id == "reversed" and len(node.args) == 1:
                self._change(node, "swapped call", node.args[0])
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)
        self.visit(node.slice)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        return  # text for people


def _is_alias(node: ast.expr) -> bool:
    """Whether an expression names a type, as in `Pair = tuple[int, int]` or `int | None`."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _is_alias(node.left) or _is_alias(node.right)
    if isinstance(node, ast.Constant):
        return node.value is None
    return isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in (
        "dict", "list", "tuple", "set", "Callable",
    )  # fmt: skip
