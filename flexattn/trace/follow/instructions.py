"""Instructions: the implementation of each instruction of Python 3.11 to 3.13, with `attributes`, `operators`, `calls`.

`f` is the interpreter, `frame` the running function, `i` the instruction with its argument.
"""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

from flexattn.trace.follow.attributes import BUILTIN_CONTAINERS, MISSING, Refusal, Unfollowable
from flexattn.trace.follow.bytecode import Instruction
from flexattn.trace.follow.calls import NativeExit
from flexattn.trace.follow.frames import Frame, Frames, Left, operation
from flexattn.trace.follow.libraries import is_library
from flexattn.trace.follow.operators import is_plain

_CALLABLE_FIRST = sys.version_info >= (3, 13)  # whether the callable of a call is below its NULL on the stack
_POPPED_AT_END = sys.version_info >= (3, 12)  # whether a loop ends with instructions that the loop itself skips
_NULL: Any = type("Null", (), {"__repr__": lambda self: "NULL"})()


def _push_callable(frame: Frame, function: Any) -> None:
    frame.push(*((function, _NULL) if _CALLABLE_FIRST else (_NULL, function)))


@operation("NOP", "RESUME", "PRECALL")
def _nop(f: Frames, frame: Frame, i: Instruction) -> None: ...


@operation("POP_TOP")
def _pop_top(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.pop()


@operation("PUSH_NULL")
def _push_null(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.push(_NULL)


@operation("COPY")
def _copy(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.push(frame.stack[-i.arg])


@operation("SWAP")
def _swap(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.stack[-1], frame.stack[-i.arg] = frame.stack[-i.arg], frame.stack[-1]


@operation("RETURN_VALUE")
def _return(f: Frames, frame: Frame, i: Instruction) -> Left:
    return Left(frame.pop(), True)


@operation("RETURN_CONST")
def _return_const(f: Frames, frame: Frame, i: Instruction) -> Left:
    return Left(i.argval, True)


@operation("LOAD_CONST")
def _load_const(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.push(_unshared(i.argval))


def _unshared(value: Any) -> Any:
    """Return a constant with new containers: the compiler may share equal tuples of a file with the user's objects."""
    kind = type(value)
    return kind([_unshared(v) for v in value]) if kind in (tuple, frozenset) else value


@operation("LOAD_ASSERTION_ERROR")
def _load_assertion_error(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.push(AssertionError)


# Variables.


@operation("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_CLOSURE")
def _load_fast(f: Frames, frame: Frame, i: Instruction) -> None:
    if i.argval not in frame.names:
        text = f"cannot access local variable {i.argval!r} where it is not associated with a value"
        raise UnboundLocalError(text)
    frame.push(frame.names[i.argval])


@operation("LOAD_FAST_LOAD_FAST")
def _load_two(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.push(*(frame.names[n] for n in i.argval))


@operation("LOAD_FAST_AND_CLEAR")
def _load_and_clear(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.push(frame.names.pop(i.argval, _NULL))


@operation("STORE_FAST")
def _store_fast(f: Frames, frame: Frame, i: Instruction) -> None:
    _store(frame, i.argval, frame.pop())


def _store(frame: Frame, name: str, value: Any) -> None:
    if value is _NULL:
        frame.names.pop(name, None)
    else:
        frame.names[name] = value


@operation("STORE_FAST_STORE_FAST")
def _store_two(f: Frames, frame: Frame, i: Instruction) -> None:
    for name in i.argval:
        _store(frame, name, frame.pop())


@operation("STORE_FAST_LOAD_FAST")
def _store_and_load(f: Frames, frame: Frame, i: Instruction) -> None:
    _store(frame, i.argval[0], frame.pop())
    frame.push(frame.names[i.argval[1]])


@operation("DELETE_FAST")
def _delete_fast(f: Frames, frame: Frame, i: Instruction) -> None:
    del frame.names[i.argval]


@operation("MAKE_CELL")
def _make_cell(f: Frames, frame: Frame, i: Instruction) -> None:
    given = (frame.names[i.argval],) if i.argval in frame.names else ()
    frame.names[i.argval] = types.CellType(*given)


@operation("COPY_FREE_VARS")
def _copy_free_vars(f: Frames, frame: Frame, i: Instruction) -> None:
    function = frame.function
    for n, (name, cell) in enumerate(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)):
        f.record.alias(function, f"{{}}.__closure__[{n}]", cell)
        frame.names[name] = cell


@operation("LOAD_DEREF")
def _load_deref(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.push(f.cell_value(frame, i.argval))


@operation("STORE_DEREF")
def _store_deref(f: Frames, frame: Frame, i: Instruction) -> None:
    cell = frame.names[i.argval]
    if f.record.has(cell):
        f.unguarded(f"it changes the captured variable {i.argval!r}")
    cell.cell_contents = f.kept_by(cell, frame.pop())


@operation("DELETE_DEREF")
def _delete_deref(f: Frames, frame: Frame, i: Instruction) -> None:
    cell = frame.names[i.argval]
    if f.record.has(cell):
        f.unguarded(f"it deletes the captured variable {i.argval!r}")
    del cell.cell_contents


@operation("LOAD_GLOBAL")
def _load_global(f: Frames, frame: Frame, i: Instruction) -> None:
    value = f.global_value(frame, i.argval)
    if i.arg & 1:
        _push_callable(frame, value)
    else:
        frame.push(value)


@operation("STORE_GLOBAL")
def _store_global(f: Frames, frame: Frame, i: Instruction) -> None:
    f.unguarded(f"it changes the global variable {i.argval!r}")
    scope = f.global_scope(frame)
    scope[i.argval] = f.kept_by(scope, frame.pop())


@operation("DELETE_GLOBAL")
def _delete_global(f: Frames, frame: Frame, i: Instruction) -> None:
    f.unguarded(f"it deletes the global variable {i.argval!r}")
    del frame.function.__globals__[i.argval]


@operation("IMPORT_NAME")
def _import_name(f: Frames, frame: Frame, i: Instruction) -> None:
    level, names = frame.take(2)
    try:
        module = builtins.__import__(i.argval, frame.function.__globals__, None, names, level)
    except BaseException:
        f.unguarded(f"it imports {i.argval!r}, which fails")
        raise
    if is_library(module.__name__):
        f.record.permanent(module)
    else:
        f.record.permanent(sys.modules)
        f.record.read_item(sys.modules, "{}[{}]", module.__name__, module)
    frame.push(module)


@operation("IMPORT_FROM")
def _import_from(f: Frames, frame: Frame, i: Instruction) -> None:
    module = frame.stack[-1]
    try:
        frame.push(f.get_attribute(module, i.argval))
    except AttributeError:
        f.unguarded(f"it imports {i.argval!r} from {module.__name__!r}, which fails")
        raise ImportError(f"cannot import name {i.argval!r} from {module.__name__!r}") from None


# Attributes and items.


@operation("LOAD_ATTR")
def _load_attr(f: Frames, frame: Frame, i: Instruction) -> None:
    value = f.get_attribute(frame.pop(), i.argval)
    if _POPPED_AT_END and i.arg & 1:  # since 3.12: a method to be called
        _push_callable(frame, value)
    else:
        frame.push(value)


@operation("LOAD_METHOD")
def _load_method(f: Frames, frame: Frame, i: Instruction) -> None:
    _push_callable(frame, f.get_attribute(frame.pop(), i.argval))


@operation("LOAD_SUPER_ATTR")
def _load_super_attr(f: Frames, frame: Frame, i: Instruction) -> None:
    function, cls, owner = frame.take(3)
    value = f.get_attribute(f.call(function, (cls, owner)), i.argval)
    if i.arg & 1:
        _push_callable(frame, value)
    else:
        frame.push(value)


@operation("STORE_ATTR")
def _store_attr(f: Frames, frame: Frame, i: Instruction) -> None:
    value, owner = frame.take(2)
    f.set_attribute(owner, i.argval, value)


@operation("DELETE_ATTR")
def _delete_attr(f: Frames, frame: Frame, i: Instruction) -> None:
    f.delete_attribute(frame.pop(), i.argval)


@operation("BINARY_SUBSCR")
def _binary_subscr(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.push(f.get_item(*frame.take(2)))


@operation("BINARY_SLICE")
def _binary_slice(f: Frames, frame: Frame, i: Instruction) -> None:
    owner, start, stop = frame.take(3)
    frame.push(f.get_item(owner, slice(start, stop)))


@operation("STORE_SUBSCR")
def _store_subscr(f: Frames, frame: Frame, i: Instruction) -> None:
    value, owner, key = frame.take(3)
    f.set_item(owner, key, value)


@operation("STORE_SLICE")
def _store_slice(f: Frames, frame: Frame, i: Instruction) -> None:
    value, owner, start, stop = frame.take(4)
    f.set_item(owner, slice(start, stop), value)


@operation("DELETE_SUBSCR")
def _delete_subscr(f: Frames, frame: Frame, i: Instruction) -> None:
    f.delete_item(*frame.take(2))


# Operators.


@operation("BINARY_OP")
def _binary_op(f: Frames, frame: Frame, i: Instruction) -> None:
    x, y = frame.take(2)
    symbol = i.argrepr
    if symbol.endswith("=") and symbol != "=":
        frame.push(f.in_place(symbol[:-1], x, y))
    else:
        frame.push(f.binary(symbol, x, y))


@operation("UNARY_NEGATIVE", "UNARY_POSITIVE", "UNARY_INVERT")
def _unary(f: Frames, frame: Frame, i: Instruction) -> None:
    symbol = {"UNARY_NEGATIVE": "-", "UNARY_POSITIVE": "+", "UNARY_INVERT": "~"}[i.opname]
    frame.push(f.unary(symbol, frame.pop()))


@operation("UNARY_NOT")
def _unary_not(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.push(not f.truth(frame.pop()))


@operation("TO_BOOL")
def _to_bool(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.push(f.truth(frame.pop()))


@operation("COMPARE_OP")
def _compare_op(f: Frames, frame: Frame, i: Instruction) -> None:
    found = f.compare(i.argval, *frame.take(2))
    frame.push(f.truth(found) if i.argrepr.startswith("bool(") else found)


@operation("IS_OP")
def _is_op(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.push(f.identical(*frame.take(2)) is not bool(i.arg))


@operation("CONTAINS_OP")
def _contains_op(f: Frames, frame: Frame, i: Instruction) -> None:
    item, container = frame.take(2)
    frame.push(f.contains(container, item) is not bool(i.arg))


@operation("FORMAT_VALUE")
def _format_value(f: Frames, frame: Frame, i: Instruction) -> None:
    spec = frame.pop() if i.arg & 4 else ""
    frame.push(f.format(frame.pop(), (None, str, repr, ascii)[i.arg & 3], spec))


@operation("CONVERT_VALUE")
def _convert_value(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.push(f.format(frame.pop(), (None, str, repr, ascii)[i.arg], ""))


@operation("FORMAT_SIMPLE")
def _format_simple(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.push(f.format(frame.pop(), None, ""))


@operation("FORMAT_WITH_SPEC")
def _format_with_spec(f: Frames, frame: Frame, i: Instruction) -> None:
    value, spec = frame.take(2)
    frame.push(f.format(value, None, spec))


# Jumps and loops.


@operation("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")
def _jump(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.position = i.target


@operation("POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_BACKWARD_IF_TRUE", "POP_JUMP_IF_TRUE")
def _jump_if_true(f: Frames, frame: Frame, i: Instruction) -> None:
    if f.truth(frame.pop()):
        frame.position = i.target


@operation("POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_BACKWARD_IF_FALSE", "POP_JUMP_IF_FALSE")
def _jump_if_false(f: Frames, frame: Frame, i: Instruction) -> None:
    if not f.truth(frame.pop()):
        frame.position = i.target


@operation("POP_JUMP_FORWARD_IF_NONE", "POP_JUMP_BACKWARD_IF_NONE", "POP_JUMP_IF_NONE")
def _jump_if_none(f: Frames, frame: Frame, i: Instruction) -> None:
    if frame.pop() is None:
        frame.position = i.target


@operation("POP_JUMP_FORWARD_IF_NOT_NONE", "POP_JUMP_BACKWARD_IF_NOT_NONE", "POP_JUMP_IF_NOT_NONE")
def _jump_if_not_none(f: Frames, frame: Frame, i: Instruction) -> None:
    if frame.pop() is not None:
        frame.position = i.target


@operation("JUMP_IF_TRUE_OR_POP")
def _jump_if_true_or_pop(f: Frames, frame: Frame, i: Instruction) -> None:
    if f.truth(frame.stack[-1]):
        frame.position = i.target
    else:
        frame.pop()


@operation("JUMP_IF_FALSE_OR_POP")
def _jump_if_false_or_pop(f: Frames, frame: Frame, i: Instruction) -> None:
    if not f.truth(frame.stack[-1]):
        frame.position = i.target
    else:
        frame.pop()


@operation("GET_ITER", "GET_YIELD_FROM_ITER")
def _get_iter(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.push(f.iterate(frame.pop()))


@operation("FOR_ITER")
def _for_iter(f: Frames, frame: Frame, i: Instruction) -> None:
    try:
        frame.push(f.next(frame.stack[-1]))
    except StopIteration:
        frame.pop()
        frame.position = i.target
        while frame.program.instructions[frame.position].opname == "END_FOR":
            frame.position += 1
            if _CALLABLE_FIRST:  # since 3.13, END_FOR is followed by a POP_TOP of the iterator
                frame.position += 1


@operation("END_FOR")
def _end_for(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.pop()


@operation("RETURN_GENERATOR")
def _return_generator(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.push(None)  # sent by the first `next`


@operation("YIELD_VALUE")
def _yield_value(f: Frames, frame: Frame, i: Instruction) -> Left:
    return Left(frame.pop(), False)


@operation("SEND")
def _send(f: Frames, frame: Frame, i: Instruction) -> None:
    value = frame.pop()
    receiver = frame.stack[-1]
    try:
        found = f.next(receiver) if value is None else f.call(f.get_attribute(receiver, "send"), (value,))
    except StopIteration as end:
        if not _POPPED_AT_END:
            frame.pop()
        frame.push(end.value)
        frame.position = i.target
        return
    frame.push(found)


@operation("END_SEND")
def _end_send(f: Frames, frame: Frame, i: Instruction) -> None:
    del frame.stack[-2]


# Calls.


@operation("KW_NAMES")
def _kw_names(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.keywords = i.argval


@operation("CALL")
def _call(f: Frames, frame: Frame, i: Instruction) -> None:
    keywords, frame.keywords = frame.keywords, ()
    _call_with(f, frame, i.arg, keywords)


@operation("CALL_KW")
def _call_kw(f: Frames, frame: Frame, i: Instruction) -> None:
    keywords = frame.pop()
    _call_with(f, frame, i.arg, keywords)


def _call_with(f: Frames, frame: Frame, count: int, keywords: tuple[str, ...]) -> None:
    values = frame.take(count)
    first, second = frame.take(2)
    if _CALLABLE_FIRST:
        function, values = first, values if second is _NULL else [second, *values]
    else:
        function, values = (second, values) if first is _NULL else (first, [second, *values])
    split = len(values) - len(keywords)
    frame.push(f.call(function, tuple(values[:split]), dict(zip(keywords, values[split:], strict=True))))


@operation("CALL_FUNCTION_EX")
def _call_function_ex(f: Frames, frame: Frame, i: Instruction) -> None:
    kwargs = frame.pop() if i.arg & 1 else {}
    args = frame.pop()
    first, second = frame.take(2)
    function = first if _CALLABLE_FIRST else second
    frame.push(f.call(function, tuple(f.items(args)), dict(f.contents(kwargs))))


@operation("MAKE_FUNCTION")
def _make_function(f: Frames, frame: Frame, i: Instruction) -> None:
    code = frame.pop()
    if _CALLABLE_FIRST:
        frame.push(f.make_function(frame, code))
        return
    cells = frame.pop() if i.arg & 8 else ()
    annotations = frame.pop() if i.arg & 4 else ()
    named = frame.pop() if i.arg & 2 else None
    defaults = frame.pop() if i.arg & 1 else None
    made = types.FunctionType(code, frame.function.__globals__, code.co_name, defaults, tuple(cells) or None)
    made.__kwdefaults__ = named
    if annotations:
        made.__annotations__ = dict(zip(annotations[::2], annotations[1::2], strict=True))
    made.__module__ = frame.function.__module__
    made.__qualname__ = code.co_qualname
    f.made_in[id(made)] = (made, frame.function)
    frame.push(made)


@operation("SET_FUNCTION_ATTRIBUTE")
def _set_function_attribute(f: Frames, frame: Frame, i: Instruction) -> None:
    value, made = frame.take(2)
    if i.arg & 1:
        made.__defaults__ = value
    elif i.arg & 2:
        made.__kwdefaults__ = value
    elif i.arg & 4:
        made.__annotations__ = dict(zip(value[::2], value[1::2], strict=True)) if type(value) is tuple else value
    frame.push(made)  # its closure was taken from the frame when it was created


# Containers.


@operation("BUILD_TUPLE")
def _build_tuple(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.push(tuple(frame.take(i.arg)))


@operation("BUILD_LIST")
def _build_list(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.push(frame.take(i.arg))


@operation("BUILD_SET")
def _build_set(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.push(f.new_set(frame.take(i.arg)))


@operation("BUILD_MAP")
def _build_map(f: Frames, frame: Frame, i: Instruction) -> None:
    values, made = frame.take(2 * i.arg), {}
    for key, value in zip(values[::2], values[1::2], strict=True):
        made[f.own_key(made, key)] = value
    frame.push(made)


@operation("BUILD_CONST_KEY_MAP")
def _build_const_key_map(f: Frames, frame: Frame, i: Instruction) -> None:
    keys = frame.pop()
    frame.push(dict(zip(keys, frame.take(i.arg), strict=True)))


@operation("BUILD_STRING")
def _build_string(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.push("".join(frame.take(i.arg)))


@operation("BUILD_SLICE")
def _build_slice(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.push(slice(*frame.take(i.arg)))


@operation("LIST_TO_TUPLE")
def _list_to_tuple(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.push(tuple(frame.pop()))


@operation("LIST_EXTEND")
def _list_extend(f: Frames, frame: Frame, i: Instruction) -> None:
    values = frame.pop()
    frame.stack[-i.arg].extend(f.items(values))


@operation("SET_UPDATE")
def _set_update(f: Frames, frame: Frame, i: Instruction) -> None:
    values = frame.pop()
    target = frame.stack[-i.arg]
    for value in f.items(values):
        target.add(f.own_key(target, value))


@operation("DICT_UPDATE", "DICT_MERGE")
def _dict_update(f: Frames, frame: Frame, i: Instruction) -> None:
    values = frame.pop()
    target = frame.stack[-i.arg]
    found = f.call(dict, (values,))
    if i.opname == "DICT_MERGE" and (twice := target.keys() & found.keys()):
        raise TypeError(f"got multiple values for keyword argument {min(twice)!r}")
    for key, value in found.items():
        target[f.own_key(target, key)] = value


@operation("LIST_APPEND")
def _list_append(f: Frames, frame: Frame, i: Instruction) -> None:
    value = frame.pop()
    frame.stack[-i.arg].append(value)


@operation("SET_ADD")
def _set_add(f: Frames, frame: Frame, i: Instruction) -> None:
    value, target = frame.pop(), frame.stack[-i.arg]
    target.add(f.own_key(target, value))


@operation("MAP_ADD")
def _map_add(f: Frames, frame: Frame, i: Instruction) -> None:
    key, value = frame.take(2)
    target = frame.stack[-i.arg]
    target[f.own_key(target, key)] = value


@operation("UNPACK_SEQUENCE")
def _unpack_sequence(f: Frames, frame: Frame, i: Instruction) -> None:
    values = f.iterated(frame.pop())
    if len(values) != i.arg:
        few = len(values) < i.arg
        raise ValueError(
            f"not enough values to unpack (expected {i.arg}, got {len(values)})"
            if few
            else f"too many values to unpack (expected {i.arg})"
        )
    frame.push(*reversed(values))


@operation("UNPACK_EX")
def _unpack_ex(f: Frames, frame: Frame, i: Instruction) -> None:
    values = f.iterated(frame.pop())
    before, after = i.arg & 255, i.arg >> 8
    if len(values) < before + after:
        raise ValueError(f"not enough values to unpack (expected at least {before + after}, got {len(values)})")
    middle = values[before : len(values) - after]
    frame.push(*reversed([*values[:before], middle, *values[len(values) - after :]]))


# Exceptions and context managers.


@operation("RAISE_VARARGS")
def _raise_varargs(f: Frames, frame: Frame, i: Instruction) -> None:
    if i.arg == 0:
        if frame.handled is None:
            raise RuntimeError("No active exception to reraise")
        raise frame.handled
    cause = frame.pop() if i.arg == 2 else MISSING
    error = frame.pop()
    error = f.call(error, ()) if isinstance(error, type) else error
    if not isinstance(error, BaseException):
        raise TypeError("exceptions must derive from BaseException")
    if cause is not MISSING:
        error.__cause__ = f.call(cause, ()) if isinstance(cause, type) else cause
    raise error


@operation("PUSH_EXC_INFO")
def _push_exc_info(f: Frames, frame: Frame, i: Instruction) -> None:
    error = frame.pop()
    frame.push(frame.handled, error)
    frame.handled = error
    if f.given_up is not None and frame.program.instructions[frame.position].opname == "POP_TOP":  # `except:`
        raise error


@operation("POP_EXCEPT")
def _pop_except(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.handled = frame.pop()


@operation("CHECK_EXC_MATCH")
def _check_exc_match(f: Frames, frame: Frame, i: Instruction) -> None:
    classes = f.deep_contents(frame.pop())
    classes = classes if isinstance(classes, tuple) else (classes,)
    if not all(isinstance(c, type) and f.is_subclass(c, BaseException) for c in classes):
        raise TypeError("catching classes that do not inherit from BaseException is not allowed")
    error = frame.stack[-1]
    is_the_mods = not isinstance(error, (Refusal, *f.passed_on))
    frame.push(is_the_mods and any(f.is_subclass(type(error), c) for c in classes))


@operation("RERAISE")
def _reraise(f: Frames, frame: Frame, i: Instruction) -> None:
    raise frame.pop()


@operation("BEFORE_WITH")
def _before_with(f: Frames, frame: Frame, i: Instruction) -> None:
    manager = frame.pop()
    if type(manager).__module__.partition(".")[0] == "torch":
        frame.push(NativeExit(manager), type(manager).__enter__(manager))
        return
    leave, enter = f.special(manager, "__exit__"), f.special(manager, "__enter__")
    if leave is MISSING or enter is MISSING:
        raise TypeError(f"{type(manager).__name__!r} object does not support the context manager protocol")
    frame.push(leave, f.call(enter, ()))


@operation("WITH_EXCEPT_START")
def _with_except_start(f: Frames, frame: Frame, i: Instruction) -> None:
    error = frame.stack[-1]
    found = f.call(frame.stack[-4], (type(error), error, error.__traceback__))
    frame.push(found if f.given_up is None else None)


@operation("CALL_INTRINSIC_1")
def _call_intrinsic(f: Frames, frame: Frame, i: Instruction) -> None:
    value = frame.pop()
    match i.arg:
        case 3:  # StopIteration inside of a generator
            frame.push(RuntimeError("generator raised StopIteration") if isinstance(value, StopIteration) else value)
        case 5:
            frame.push(f.unary("+", value))
        case 6:
            frame.push(tuple(value))
        case _:
            raise Unfollowable(f"it uses the intrinsic {i.argrepr} of Python")


# Pattern matching.


@operation("GET_LEN")
def _get_len(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.push(f.length(frame.stack[-1]))


@operation("MATCH_MAPPING")
def _match_mapping(f: Frames, frame: Frame, i: Instruction) -> None:
    frame.push(_is_of(f, frame.stack[-1], Mapping))


@operation("MATCH_SEQUENCE")
def _match_sequence(f: Frames, frame: Frame, i: Instruction) -> None:
    value = frame.stack[-1]
    frame.push(_is_of(f, value, Sequence) and not isinstance(value, (str, bytes, bytearray)))


def _is_of(f: Frames, value: Any, abstract: type) -> bool:
    known = type(value) in BUILTIN_CONTAINERS or is_plain(value)
    return isinstance(value, abstract) if known else f.call(isinstance, (value, abstract))


@operation("MATCH_KEYS")
def _match_keys(f: Frames, frame: Frame, i: Instruction) -> None:
    subject, keys = frame.stack[-2:]
    found = all(f.contains(subject, k) for k in keys)
    frame.push(tuple(f.get_item(subject, k) for k in keys) if found else None)


_ITSELF = (bool, bytearray, bytes, dict, float, frozenset, int, list, set, str, tuple)  # `case int(x)`


@operation("MATCH_CLASS")
def _match_class(f: Frames, frame: Frame, i: Instruction) -> None:
    subject, cls, names = frame.take(3)
    if not f.call(isinstance, (subject, cls)):
        frame.push(None)
        return
    positional = _match_args(f, cls, i.arg) if i.arg else ()
    first = (subject,) if i.arg and not positional else ()
    try:
        frame.push((*first, *(f.get_attribute(subject, n) for n in (*positional, *names))))
    except AttributeError:
        frame.push(None)


def _match_args(f: Frames, cls: type, count: int) -> tuple[str, ...]:
    """Return the attribute names of positional patterns; none if the single pattern matches the subject itself."""
    try:
        names = f.get_attribute(cls, "__match_args__")
    except AttributeError:
        if count == 1 and any(base in _ITSELF for base in cls.__mro__):
            return ()
        names = ()
    names = f.contents(names)
    if type(names) is not tuple or not all(isinstance(n, str) for n in names[:count]):
        raise TypeError(f"{cls.__name__}.__match_args__ must be a tuple of strings")
    if len(names) < count:
        raise TypeError(f"{cls.__name__}() accepts {len(names)} positional sub-patterns ({count} given)")
    return names[:count]
