"""Parentheses around expressions that are moved or inserted."""

from __future__ import annotations

from typing import Any

import libcst as cst

_LOOSE = (
    cst.IfExp,
    cst.Lambda,
    cst.BooleanOperation,
    cst.Comparison,
    cst.BinaryOperation,
    cst.UnaryOperation,
    cst.NamedExpr,
    cst.Await,
    cst.Yield,
)
"""Expressions of which an operator beside them may take a part."""

_WHOLE = {
    cst.Assign: "value",
    cst.AnnAssign: "value",
    cst.AugAssign: "value",
    cst.Return: "value",
    cst.Expr: "value",
    cst.Arg: "value",
    cst.Element: "value",
    cst.DictElement: "value",
    cst.Index: "value",
    cst.Param: "default",
    cst.FormattedStringExpression: "expression",
}
"""Where an expression is a whole part, and the name of that part."""


def enclosed(new: Any, old: cst.CSTNode, above: cst.CSTNode | None) -> Any:
    """Return an expression in parentheses if it needs them where it is inserted.

    Args:
        new: The inserted expression.
        old: The expression that it replaces.
        above: The parent of `old`.
    """
    kind = type(above)
    alone = kind in _WHOLE and getattr(above, _WHOLE[kind]) is old
    if alone and not (isinstance(above, cst.Arg) and above.star):
        plain = not isinstance(new, cst.NamedExpr | cst.Yield)
        return on_own_line(new) if plain else grouped(new)
    return on_own_line(grouped(new) if isinstance(new, _LOOSE) else new)


def grouped(node: Any) -> Any:
    """Return an expression in parentheses if an operator may take a part of it."""
    return _in_parentheses(node) if isinstance(node, _LOOSE) else as_one(node)


def as_one(node: Any) -> Any:
    """Return an expression as one argument: a bare tuple would become several."""
    return _in_parentheses(node) if isinstance(node, cst.Tuple) else node


def on_own_line(node: Any) -> Any:
    """Return an expression in parentheses if it has several lines and no brackets."""
    code = cst.Module([]).code_for_node(node)
    if "\n" not in code:
        return node
    try:
        cst.parse_expression(code)
    except cst.ParserSyntaxError:
        return _in_parentheses(node)
    return node


def _in_parentheses(node: Any) -> Any:
    if node.lpar:
        return node
    return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
