"""provider: the operators in PyTorch's dispatcher, in place of its own kernels, which compute what is not handled."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.library import Library, get_kernel

from flexattn.errors import UnsupportedError, message
from flexattn.process.events import fallback
from flexattn.sdpa import operators
from flexattn.sdpa.rules import Unhandled
from flexattn.torch_state.uncompiled import uncompiled

NAME = "flexattn"
OPERATORS: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": operators.flash_attention_forward,
    "_flash_attention_forward_no_dropout_inplace": operators.flash_attention_forward_no_dropout_inplace,
    "_flash_attention_backward": operators.flash_attention_backward,
    "_scaled_dot_product_flash_attention": operators.scaled_dot_product_flash_attention,
    "_scaled_dot_product_flash_attention_backward": operators.scaled_dot_product_flash_attention_backward,
}


class Handle:
    """An active provider. `remove` gives PyTorch its own kernels back; so does the end of a `with` block."""

    def __init__(self, library: Library) -> None:
        self._library: Library | None = library

    @property
    def is_active(self) -> bool:
        """Whether the kernels are replaced."""
        return self._library is not None

    def remove(self) -> None:
        """Restore PyTorch's own kernels. A second call does nothing."""
        library, self._library = self._library, None
        if library is not None:
            library._destroy()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<flexattn.sdpa.Handle, {'active' if self.is_active else 'removed'}>"


def register(name: str = NAME) -> Handle | None:
    """Add flexattn to PyTorch's registry of flash attention implementations, under a name. It is not yet active.

    `torch.nn.attention.activate_flash_attention_impl("flexattn")` activates it, and
    `torch.nn.attention.restore_flash_attention_impl()` restores PyTorch's kernels. Both may be repeated.

    Args:
        name: the name of the implementation.

    Returns:
        None. In versions of torch without the registry it is active at once, and its Handle is returned.

    Example:
        >>> import torch
        >>> register()
        >>> "flexattn" in torch.nn.attention.list_flash_attention_impls()
        True
    """
    registry = getattr(nn.attention, "register_flash_attention_impl", None)
    if registry is None:
        return activate()
    registry(name, register_fn=activate)
    return None


def activate(dispatch_key: str = "CUDA") -> Handle:
    """Replace PyTorch's flash attention kernels until the handle is removed, without PyTorch's registry.

    Args:
        dispatch_key: the kind of device. "CPU" is for tests: PyTorch has no such kernels there.

    Raises RuntimeError if another provider of Python kernels is active, in versions of torch that allow one. Nothing is
    replaced then. Restore the other first.

    Example:
        >>> import torch
        >>> query = key = value = torch.randn(1, 2, 16, 32)
        >>> with activate("CPU"):
        ...     torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0].shape
        torch.Size([1, 2, 16, 32])
    """
    library = Library("aten", "IMPL", dispatch_key)
    with warnings.catch_warnings():
        # The dispatcher warns once per process that a kernel is replaced. Here that is what was asked for.
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        try:
            _replace_kernels(library, dispatch_key)
        except BaseException:  # PyTorch refused one. Those before it are not kept.
            library._destroy()
            raise
    return Handle(library)


def _replace_kernels(library: Library, dispatch_key: str) -> None:
    for name, compute in OPERATORS.items():
        if hasattr(torch.ops.aten, name):  # older versions of torch lack one
            own = _own_kernel(name, dispatch_key)
            library.impl(name, _with_fallback(name, compute, own), dispatch_key, with_keyset=True)


def _own_kernel(name: str, dispatch_key: str) -> Any:
    """Return PyTorch's own kernel, or None if there is none for this kind of device."""
    try:
        return get_kernel(f"aten::{name}", dispatch_key)
    except RuntimeError:
        return None


def _with_fallback(name: str, compute: Callable[..., Any], own: Any) -> Callable[..., Any]:
    """Return a kernel that computes a call, or leaves it to PyTorch's own kernel."""

    @uncompiled  # code that torch.compile skips may call the operator, and torch.compile then looks at this frame
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return compute(*args, **kwargs)
        except Unhandled as unhandled:
            reason = str(unhandled)
        fallback(f"sdpa {name}", reason)
        if own is None:
            fix = "Call scaled_dot_product_attention with SDPBackend.MATH."
            raise UnsupportedError(message(name, reason, "a call that flexattn handles", fix))
        return own.call_boxed(keys, *args, **kwargs)

    return kernel
