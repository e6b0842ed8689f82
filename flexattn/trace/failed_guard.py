"""failed_guard: why the guard of a trace did not pass, in the names of the user's code."""

from __future__ import annotations

import ast
import re
from typing import Any

import torch
from torch import Tensor

from flexattn.trace.memo import GuardedTrace

_LONGEST = 60  # characters of a value
_PRINTED = frozenset((int, float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout))


def reason_of(known: GuardedTrace, mod: Any) -> str:
    """Return the first condition of a guard that does not hold for a mod, with the values that it compares."""
    function = ast.parse(known.source).body[0]
    assert isinstance(function, ast.FunctionDef) and isinstance(function.body[0], ast.Try)
    scope: dict[str, Any] = {**known.guard.__globals__, "mod": mod}
    texts: dict[str, str] = {"mod": "mod"}  # of each variable: what the user would write
    for line in function.body[0].body:
        if isinstance(line, ast.If):
            if _value(line.test, scope) is not False:
                return _described(line.test, texts, scope)
        elif isinstance(line, ast.Assign):
            target = line.targets[0]
            value = _value(line.value, scope)
            if value is _ERROR:
                return f"{_text(line.value, texts, scope)} does not exist"
            if isinstance(target, ast.Name):
                texts[target.id] = _text(line.value, texts, scope)
                scope[target.id] = value
            elif isinstance(target, ast.Tuple):
                if len(target.elts) != len(value):
                    return f"{_text(line.value, texts, scope)} has {len(value)} elements"
                text = _text(line.value, texts, scope)
                texts.update({ast.unparse(n): f"{text}[{i}]" for i, n in enumerate(target.elts)})
                scope.update(zip((ast.unparse(name) for name in target.elts), value, strict=True))
    return "none that can be named"


_ERROR = object()


def _value(node: ast.expr, scope: dict[str, Any]) -> Any:
    try:
        return eval(compile(ast.fix_missing_locations(ast.Expression(node)), "<guard>", "eval"), scope)
    except Exception:
        return _ERROR


_ATTRIBUTE = re.compile(r"object\.__getattribute__\(((?:[^()]|\([^()]*\))+), '__dict__'\)\['(\w+)'\]")
_OF_MODULE = re.compile(r"\._(?:parameters|buffers|modules)\['(\w+)'\]")


def _text(node: ast.expr, texts: dict[str, str], scope: dict[str, Any]) -> str:
    """Return an expression as the user would write it."""
    text = ast.unparse(_readable(node, texts, scope)).replace("mod.__self__", "self")
    while (shorter := _ATTRIBUTE.sub(r"\1.\2", text)) != text:
        text = shorter
    return _OF_MODULE.sub(r".\1", text)


def _described(test: ast.expr, texts: dict[str, str], scope: dict[str, Any]) -> str:
    test = _failing(test, scope)
    compared = test.operand if isinstance(test, ast.UnaryOp) else test
    read: list[ast.expr] = [compared.left] if isinstance(compared, ast.Compare) else []
    if not read or isinstance(read[0], ast.Call):  # type(x), for example
        names = sorted({n.id for n in ast.walk(test) if isinstance(n, ast.Name) and n.id in texts and n.id != "mod"})
        read = [ast.Name(name, ast.Load()) for name in names]
    values = [f"{_text(node, texts, scope)} is {_short(_value(node, scope))}" for node in read]
    return _text(test, texts, scope) + (f" ({', '.join(values)})" if values else "")


def _failing(test: ast.expr, scope: dict[str, Any]) -> ast.expr:
    """Return the part of a condition that decides, of parts joined by `or`, or by `not (... and ...)`."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        return _failing(next((part for part in test.values if _value(part, scope)), test.values[-1]), scope)
    inner = test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else None
    if isinstance(inner, ast.BoolOp) and isinstance(inner.op, ast.And):
        part = next((part for part in inner.values if _value(part, scope) in (False, _ERROR)), inner.values[-1])
        return ast.UnaryOp(ast.Not(), part)
    return test


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        try:
            return f"{value.dtype} {list(value.shape)} on {value.device}"
        except RuntimeError:  # a nested tensor, or an uninitialized one
            return f"a {type(value).__name__}"
    if isinstance(value, type):
        return value.__name__
    # The repr of another object runs the user's code.
    text = repr(value) if type(value) in _PRINTED else f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _readable(node: ast.expr, texts: dict[str, str], scope: dict[str, Any]) -> ast.expr:
    """Return an expression with variables replaced by their texts, and these by the names in the user's code."""

    class Rename(ast.NodeTransformer):
        def visit_Name(self, found: ast.Name) -> ast.AST:
            text = texts.get(found.id)
            if text is None:
                return ast.Name(_short(scope[found.id]), ast.Load()) if found.id in scope else found
            return ast.Name(text, ast.Load())

        def visit_Attribute(self, found: ast.Attribute) -> ast.AST:
            cell = found.value
            if (
                found.attr == "cell_contents"
                and isinstance(cell, ast.Subscript)
                and isinstance(cell.value, ast.Attribute)
            ):
                function, index = _value(cell.value.value, scope), _value(cell.slice, scope)
                names = getattr(getattr(function, "__code__", None), "co_freevars", ())
                if isinstance(index, int) and index < len(names):
                    return ast.Name(names[index], ast.Load())
            return self.generic_visit(found)

        def visit_Subscript(self, found: ast.Subscript) -> ast.AST:
            owner = found.value
            text = texts.get(owner.id) if isinstance(owner, ast.Name) else None
            if text is not None and text.endswith(".__globals__") and isinstance(found.slice, ast.Constant):
                return ast.Name(str(found.slice.value), ast.Load())
            return self.generic_visit(found)

    return Rename().visit(ast.parse(ast.unparse(node), mode="eval").body)
