"""Frames: Python functions, run instruction by instruction, with their locals, exceptions and control flow.

This interpreter runs a mod while it is traced, so that everything it reads is recorded. The table OPERATIONS defines
each instruction. `instructions` fills it.
"""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flexattn.errors import FlexAttentionError
from flexattn.process.places import place
from flexattn.trace.follow.attributes import Refusal, Unfollowable
from flexattn.trace.follow.bytecode import Instruction, Program, program_of
from flexattn.trace.follow.calls import Calls

Function = Any  # a types.FunctionType, which type checkers would treat as a method if it is an attribute
MOST_STEPS = 2_000_000  # instructions of one mod
MOST_FRAMES = 200


@dataclass
class Frame:
    """A running function."""

    function: Function
    program: Program
    names: dict[str, Any]  # locals; for a variable shared with an inner function, its cell
    stack: list[Any] = field(default_factory=list)
    position: int = 0
    line: int = 0
    keywords: tuple[str, ...] = ()  # of the next call
    handled: BaseException | None = None  # the exception that a bare `raise` re-raises

    def push(self, *values: Any) -> None:
        self.stack.extend(values)

    def pop(self) -> Any:
        return self.stack.pop()

    def take(self, count: int) -> list[Any]:
        """Pop `count` values, in the order in which they were pushed."""
        if not count:
            return []
        values = self.stack[-count:]
        del self.stack[-count:]
        return values


@dataclass(frozen=True, slots=True)
class Left:
    """How a frame was left: by a return or by a yield."""

    value: Any
    finished: bool


Operation = Callable[["Frames", Frame, Instruction], Left | None]
OPERATIONS: dict[str, Operation] = {}  # by opname


def operation(*names: str) -> Callable[[Operation], Operation]:
    """Register the implementation of instructions."""

    def note(handler: Operation) -> Operation:
        OPERATIONS.update(dict.fromkeys(names, handler))
        return handler

    return note


def _unknown(f: Frames, frame: Frame, i: Instruction) -> None:
    what = {"LOAD_BUILD_CLASS": "it defines a class"}.get(i.opname, f"it uses the instruction {i.opname} of Python")
    raise Unfollowable(what)


class Frames(Calls):
    """Runs Python functions."""

    passed_on: tuple[type[BaseException], ...] = (Unfollowable, FlexAttentionError)  # exceptions that no mod can catch
    given_up: BaseException | None = None  # the first of them

    def __init__(self, record: Any) -> None:
        super().__init__(record)
        self.frames: list[Frame] = []
        self._steps = 0
        self.made_in: dict[int, tuple[Any, Function]] = {}  # id -> a function created by the mod, its creator

    def run(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a Python function."""
        code = function.__code__
        if code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
            raise Unfollowable("it calls an async function")
        frame = Frame(
            function, program_of(code), self._bind_arguments(function, args, kwargs), line=code.co_firstlineno
        )
        if code.co_flags & inspect.CO_GENERATOR:
            return self._generate(frame)
        return self._execute(frame).value

    def _generate(self, frame: Frame) -> Iterator[Any]:
        error: BaseException | None = None
        while True:
            left = self._execute(frame, error)
            if left.finished:
                return left.value
            error = None
            try:
                sent = yield left.value
            except BaseException as thrown:
                error = thrown
            else:
                frame.push(sent)

    def _execute(self, frame: Frame, error: BaseException | None = None) -> Left:
        """Run a frame until it returns or yields. If `error` is given, raise it in the frame first."""
        if len(self.frames) >= MOST_FRAMES:
            raise Unfollowable("it calls functions in each other too deeply")
        self.frames.append(frame)
        try:
            while True:
                instruction = frame.program.instructions[frame.position - 1 if error is not None else frame.position]
                try:
                    if error is not None:
                        error, thrown = None, error
                        raise thrown
                    frame.line = instruction.line
                    frame.position += 1
                    self._count_step()
                    left = OPERATIONS.get(instruction.opname, _unknown)(self, frame, instruction)
                except Refusal as refusal:
                    refusal.line = refusal.line or place(frame.function.__code__.co_filename, frame.line)
                    self._give_up(frame, instruction, refusal)
                except self.passed_on as stopped:
                    self._give_up(frame, instruction, stopped)
                except RecursionError:
                    self._give_up(frame, instruction, Unfollowable("it calls functions in each other too deeply"))
                except BaseException as raised:
                    self._handle(frame, instruction, raised)
                else:
                    if left is not None:
                        return left
        finally:
            self.frames.pop()

    def _count_step(self) -> None:
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise Unfollowable(f"it runs more than {MOST_STEPS:,} instructions")

    def _give_up(self, frame: Frame, instruction: Instruction, error: BaseException) -> None:
        """Leave a frame with an error that the mod must not catch: `finally` and `with` run, `except` does not."""
        self.given_up = self.given_up or error
        if frame.program.handler_at(instruction.offset) is None:
            raise error
        self._handle(frame, instruction, error)

    def _handle(self, frame: Frame, instruction: Instruction, error: BaseException) -> None:
        """Jump to the handler of an exception, or raise it out of the frame."""
        if error.__context__ is None and frame.handled is not error:
            error.__context__ = frame.handled
        handler = frame.program.handler_at(instruction.offset)
        if handler is None:
            error.__traceback__ = _with_line(error, frame)
            raise error
        del frame.stack[handler.depth :]
        if handler.push_offset:
            frame.push(instruction.offset)
        frame.push(error)
        frame.position = handler.target

    # Arguments, variables.

    def _bind_arguments(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        code, rest = function.__code__, dict(kwargs)
        count, positional = code.co_argcount, code.co_varnames[: code.co_argcount]
        keyword_only = code.co_varnames[count : count + code.co_kwonlyargcount]
        names = dict(zip(positional, args, strict=False))
        for name in (*positional[code.co_posonlyargcount :], *keyword_only):
            if name in rest:
                if name in names:
                    raise TypeError(f"{function.__name__}() got multiple values for argument {name!r}")
                names[name] = rest.pop(name)
        self._bind_defaults(function, positional, keyword_only, names)
        after = count + code.co_kwonlyargcount
        if code.co_flags & inspect.CO_VARARGS:
            names[code.co_varnames[after]] = tuple(args[count:])
            after += 1
        elif len(args) > count:
            raise TypeError(f"{function.__name__}() takes {count} positional arguments but {len(args)} were given")
        if code.co_flags & inspect.CO_VARKEYWORDS:
            names[code.co_varnames[after]] = rest
        elif rest:
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {next(iter(rest))!r}")
        return names

    def _bind_defaults(
        self,
        function: Function,
        positional: Sequence[str],
        keyword_only: Sequence[str],
        names: dict[str, Any],
    ) -> None:
        defaults = function.__defaults__ or ()
        first = len(positional) - len(defaults)
        missing = []
        for i, name in enumerate(positional):
            if name in names:
                continue
            if i < first:
                self.record.check(function, "len({0}.__defaults__ or ()) == {1}", len(defaults))
                missing.append(name)
                continue
            template = f"{{}}.__defaults__[{i - len(positional)}]"
            names[name] = self.record.read(function, template, defaults[i - first], name)
        for name in keyword_only:
            if name in names:
                continue
            if name not in (function.__kwdefaults__ or {}):
                self.record.check(function, "{1} not in ({0}.__kwdefaults__ or ())", name)
                missing.append(name)
                continue
            template = f"{{}}.__kwdefaults__[{name!r}]"
            names[name] = self.record.read(function, template, function.__kwdefaults__[name], name)
        if missing:
            raise TypeError(f"{function.__name__}() missing required arguments: {', '.join(map(repr, missing))}")

    def owner_of(self, function: Function) -> Function:
        """Return the function, or if the mod created it while it ran, the user's function that created it."""
        while not self.record.has(function) and id(function) in self.made_in:
            function = self.made_in[id(function)][1]
        return function

    def global_scope(self, frame: Frame) -> dict[str, Any]:
        """Return the globals of a frame, with a variable in the guard."""
        scope = frame.function.__globals__
        if not self.record.has(scope):
            self.record.read(self.owner_of(frame.function), "{}.__globals__", scope)
        elif self.record.has(frame.function):
            self.record.read(frame.function, "{}.__globals__", scope)
        return scope

    def global_value(self, frame: Frame, name: str) -> Any:
        """Return the value of a global variable or a builtin."""
        scope = self.global_scope(frame)
        if name in scope:
            return self.record.read_item(scope, "{}[{}]", name, scope[name], name)
        self.record.check(scope, "{1} not in {0}", name)
        found = frame.function.__builtins__
        found = found if isinstance(found, dict) else vars(found)
        if name not in found:
            self.record.permanent(found)
            self.record.check(found, "{1} not in {0}", name)
            raise NameError(f"name {name!r} is not defined", name=name)
        value = found[name]
        if isinstance(value, (types.BuiltinFunctionType, type)) and value.__module__ in ("builtins", "_io"):
            return value
        self.record.permanent(found)  # a name added by the user
        return self.record.read_item(found, "{}[{}]", name, value, name)

    def cell_value(self, frame: Frame, name: str) -> Any:
        """Return the value of a variable shared between functions."""
        cell = frame.names[name]
        try:
            value = cell.cell_contents
        except ValueError:
            if self.record.has(cell):
                self.unguarded(f"it reads the variable {name!r}, which has no value yet")
            raise NameError(
                f"cannot access free variable {name!r} where it is not associated with a value in enclosing scope"
            ) from None
        return self.record.read(cell, "{}.cell_contents", value, name)

    def make_function(self, frame: Frame, code: types.CodeType) -> Function:
        """Return a function created by the mod. Its closure is filled in before it is called."""
        cells = tuple(frame.names[n] for n in code.co_freevars)
        made = types.FunctionType(code, frame.function.__globals__, code.co_name, None, cells or None)
        made.__module__ = frame.function.__module__
        self.made_in[id(made)] = (made, frame.function)
        return made

    def arguments_of_super(self) -> tuple[type, Any]:
        """Return the class and the object that `super()` means in the running function."""
        frame = self.frames[-1]
        first = frame.names[frame.function.__code__.co_varnames[0]]
        if isinstance(first, types.CellType):
            first = first.cell_contents
        return self.cell_value(frame, "__class__"), first

    def line(self, is_users: Callable[[str], bool]) -> str | None:
        """Return file:line of the innermost frame in the user's code."""
        for frame in reversed(self.frames):
            if is_users(frame.function.__code__.co_filename):
                return place(frame.function.__code__.co_filename, frame.line)
        return None


def _with_line(error: BaseException, frame: Frame) -> types.TracebackType | None:
    """Return the traceback of an exception with an entry for the user's line, as if Python had created it."""
    code = frame.function.__code__
    text = "\n" * (frame.line - 1) + "raise error"
    fake = compile(text, code.co_filename, "exec").replace(co_name=code.co_name, co_qualname=code.co_qualname)
    inner = error.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_filename.startswith(_HERE):
        inner = inner.tb_next
    try:
        exec(fake, {"error": error.with_traceback(None)})
    except BaseException as raised:
        own = raised.__traceback__.tb_next if raised.__traceback__ is not None else None
    assert own is not None
    own.tb_next = inner
    return own


_HERE = __file__.rpartition("/")[0]


class Follower(Frames):
    """Runs a mod, and records what it reads."""

    def mod(self, *inputs: Tensor) -> Any:
        """Run the mod on its inputs."""
        running = _running.followers
        running.append(self)
        try:
            return self.call(self.record.start(), inputs)
        finally:
            running.pop()
            if self.given_up is not None:  # even if a `finally` raised something else, or returned
                raise self.given_up


class _Running(threading.local):
    def __init__(self) -> None:
        self.followers: list[Follower] = []


_running = _Running()


def current_line(is_users: Callable[[str], bool]) -> str | None:
    """Return file:line of the user's code that a follower in this thread runs, or None."""
    return next((line for f in reversed(_running.followers) if (line := f.line(is_users)) is not None), None)
