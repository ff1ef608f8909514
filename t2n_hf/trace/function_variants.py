"""Variants of functions of other people: with other names in sight, other assignments, or without their asserts."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from functools import update_wrapper
from types import CellType, CodeType, FunctionType
from typing import Any, final

__all__ = ["in_scope", "with_assignments", "without_asserts"]


def in_scope(function: Callable[..., Any], names: Mapping[str, Any]) -> Callable[..., Any]:
    """`function`, with what decorates it, that finds `names` where it looks for those of its module.

    Only its own code does, not that of the functions it calls. Raises TypeError for what is no function of Python.
    """
    inner = inspect.unwrap(function)
    if not isinstance(inner, FunctionType):
        raise TypeError(f"{inner!r} is no function of Python code")
    rewritten = FunctionType(
        inner.__code__, {**inner.__globals__, **names}, inner.__name__, inner.__defaults__, inner.__closure__
    )
    return _decorated_as(function, _looks_like(inner, rewritten))


def without_asserts(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with what decorates it, as `python -O` compiles it: its asserts check nothing.

    Raises TypeError for what is no function of Python, OSError when its source is not there.
    """
    return _recompiled(function, {}, optimize=1)


def with_assignments(function: Callable[..., Any], values: Mapping[str, str]) -> Callable[..., Any]:
    """`function`, with what decorates it, whose assignments to the names in `values` are of these expressions.

    Raises TypeError for what is no function of Python, OSError when its source is not there, KeyError for a name that
    it does not assign.
    """
    return _recompiled(function, values, optimize=-1)


@final
class _Assignments(ast.NodeTransformer):
    """Puts other expressions into assignments to single names."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.missing = dict(values)
        self._values = dict(values)

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        """Replace the value of an assignment, if its name is one of those."""
        name = node.targets[0].id if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name) else None
        if name in self._values:
            self.missing.pop(name, None)
            expression = ast.parse(self._values[name], mode="eval").body
            for part in ast.walk(expression):
                ast.copy_location(part, node.value)
            node.value = expression
        return node


def _recompiled(function: Callable[..., Any], values: Mapping[str, str], optimize: int) -> Callable[..., Any]:
    inner = inspect.unwrap(function)
    if not isinstance(inner, FunctionType):
        raise TypeError(f"{inner!r} is no function of Python code")
    code = inner.__code__
    definition = _definition(inner)
    changed = _Assignments(values)
    changed.visit(definition)
    if changed.missing:
        raise KeyError(f"{inner.__qualname__} assigns no {', '.join(changed.missing)}")
    # Variables of functions around it, `__class__` of `super()` too, are those of a function around it again.
    outer = ast.parse(f"def outer({', '.join(code.co_freevars)}):\n    pass")
    outer.body[0].body = [definition]  # type: ignore[attr-defined]
    compiled = compile(ast.fix_missing_locations(outer), code.co_filename, "exec", optimize=optimize)
    (around,) = (constant for constant in compiled.co_consts if isinstance(constant, CodeType))
    (plain,) = (c for c in around.co_consts if isinstance(c, CodeType) and c.co_name == code.co_name)
    cells = dict(zip(code.co_freevars, inner.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in plain.co_freevars)
    rewritten = FunctionType(plain, inner.__globals__, inner.__name__, inner.__defaults__, closure)
    return _decorated_as(function, _looks_like(inner, rewritten))


def _definition(function: FunctionType) -> ast.FunctionDef:
    """The source of a function, at its lines, without what is evaluated beside it: decorators, types, defaults."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    definition.returns = None
    for argument in ast.walk(definition.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    definition.args.defaults = [ast.Constant(None) for _ in definition.args.defaults]
    definition.args.kw_defaults = [default and ast.Constant(None) for default in definition.args.kw_defaults]
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
    return definition


def _looks_like(function: FunctionType, rewritten: FunctionType) -> FunctionType:
    rewritten.__kwdefaults__ = function.__kwdefaults__
    update_wrapper(rewritten, function)
    del rewritten.__wrapped__  # type: ignore[attr-defined]
    return rewritten


def _decorated_as(function: Callable[..., Any], inner: FunctionType) -> Callable[..., Any]:
    """The decorators of `function` around `inner`: each is a function that holds the one it is around in a cell."""
    around = getattr(function, "__wrapped__", None)
    if around is None:
        return inner
    held = _decorated_as(around, inner)
    if not isinstance(function, FunctionType):
        raise TypeError(f"{function!r} decorates {around!r}, and is no function of Python code")
    cells = tuple(CellType(held) if _holds(cell, around) else cell for cell in function.__closure__ or ())
    again = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    again = _looks_like(function, again)
    again.__wrapped__ = held  # type: ignore[attr-defined]
    return again


def _holds(cell: CellType, value: Any) -> bool:  # noqa: ANN401 - any object
    try:
        return cell.cell_contents is value
    except ValueError:  # an empty cell
        return False
