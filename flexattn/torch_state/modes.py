"""torch modes around a call: a default device does not affect it, and a mode that records a graph is recognized."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from flexattn.errors import UnsupportedError, message

F = TypeVar("F", bound=Callable[..., Any])

_function_modes, _dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack

# Modes in which tensors have no values, or represent nodes of a graph; by name, because some need heavy imports.
_RECORDING = frozenset(
    ("FakeTensorMode", "ProxyTorchDispatchMode", "FunctionalTensorMode", "PreDispatchTorchFunctionMode")
)
# Selective checkpointing stores the results of operators by order, and reads them in that order when it runs a region
# again. It must not see operators that run only sometimes: those of a trace, of a mask that a cache may have, and an
# engine's own, which may run in any order, in several threads, and into buffers.
_STORING = frozenset(("_CachingTorchDispatchMode", "_CachedTorchDispatchMode"))


def undisturbed(name: str, when_recording: Callable[..., Any] | None = None, hidden: bool = False) -> Callable[[F], F]:
    """Make a function create tensors on the CPU if it names no device, whatever the default device is.

    Inside a mode that records a graph, or whose tensors have no values, `when_recording` is called instead. Without
    one, UnsupportedError with this name is raised. `hidden`: other dispatch modes do not see what is computed.
    """

    def decorate(function: F) -> F:
        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if not is_in_mode():
                return function(*args, **kwargs)
            if when_recording is not None and is_recording():
                return when_recording(*args, **kwargs)
            with _own_device(name), hidden_from_modes() if hidden else nullcontext():
                return function(*args, **kwargs)

        return called  # type: ignore[return-value]

    return decorate


def is_in_mode() -> bool:
    """Return whether any mode of torch is active."""
    return bool(_function_modes() or _dispatch_modes())


def is_recording() -> bool:
    """Return whether a mode records a graph, or gives tensors without values."""
    modes = (*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()) if is_in_mode() else ()
    return any(type(mode).__name__ in _RECORDING for mode in modes)


def is_storing() -> bool:
    """Return whether a region with selective checkpointing runs."""
    return bool(_dispatch_modes()) and any(
        type(mode).__name__ in _STORING for mode in _get_current_dispatch_mode_stack()
    )


def unstored(function: F) -> F:
    """Hide from selective checkpointing what a function computes. Its gradients are recorded as usual."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or not is_storing():
            return function(*args, **kwargs)
        with _disable_current_modes():
            return function(*args, **kwargs)

    return called  # type: ignore[return-value]


def hidden_from_modes() -> AbstractContextManager[object]:
    """Return a context that leaves the dispatch modes that only watch operators."""
    return _disable_current_modes() if _dispatch_modes() and not is_recording() else nullcontext()


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Leave all modes, so that tensors are created and computed as without them."""
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        for _ in range(_function_modes()):
            stack.enter_context(_pop_mode_temporarily())
        yield


@contextmanager
def without_autocast(device_types: Iterable[str]) -> Iterator[None]:
    """Turn autocast off for these types of devices, as around what a mod computes."""
    with ExitStack() as stack:
        for device_type in {*device_types}:
            if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def users_device() -> AbstractContextManager[object]:
    """Return the context for user code inside a call: with the default device that was set around the call."""
    device = _defaults.device
    return nullcontext() if device is None or device.type == "meta" else torch.device(device)


class _Defaults(threading.local):
    device: torch.device | None = None  # the default device around the outermost call, if it is not the CPU


_defaults = _Defaults()


def _own_device(name: str) -> AbstractContextManager[object]:
    functions = _get_current_function_mode_stack()
    for mode in (*_get_current_dispatch_mode_stack(), *functions):
        kind = type(mode).__name__
        if kind in _RECORDING:
            found = f"a call inside of {kind}, as in torch.export and make_fx"
            fix = "Call it on tensors with values, outside of the recorded region."
            raise UnsupportedError(message(name, found, "a call that computes its result", fix))
    # A default device is a mode too. torch.get_default_device fails inside torch.func's transforms.
    default = next((mode.device for mode in reversed(functions) if isinstance(mode, DeviceContext)), None)
    return nullcontext() if default is None or default.type == "cpu" else _on_the_cpu(default)


@contextmanager
def _on_the_cpu(default: torch.device) -> Iterator[None]:
    before, _defaults.device = _defaults.device, default
    try:
        with torch.device("cpu"):
            yield
    finally:
        _defaults.device = before
