"""torch_flex: flexattn for software that imports torch.nn.attention.flex_attention.

`install_as_torch_flex()` replaces the functions of that module. A function of torch that other software already holds
(by `from ... import flex_attention`, in a class, or inside of torch.compile) cannot be replaced there. It keeps its
identity and gets other code, which forwards each call.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from itertools import count
from types import CodeType, FunctionType, TracebackType
from typing import Any

from torch.nn.attention import flex_attention as upstream

from flexattn.api import flex_attention as _flexattn_flex_attention
from flexattn.mask_build.create import create_block_mask as _flexattn_create_block_mask
from flexattn.mask_build.create import create_mask as _flexattn_create_mask
from flexattn.mods import and_masks as _flexattn_and_masks
from flexattn.mods import or_masks as _flexattn_or_masks
from flexattn.process.events import LOGGER
from flexattn.process.forks import Lock
from flexattn.process.frozen_class import frozen
from flexattn.torch_state.uncompiled import uncompiled

# noop_mask computes the same in both. Torch's stays, because software compares mask_mods with it by identity.
_OURS: dict[str, Callable[..., Any]] = {
    "flex_attention": _flexattn_flex_attention,
    "create_block_mask": _flexattn_create_block_mask,
    "create_mask": _flexattn_create_mask,
    "and_masks": _flexattn_and_masks,
    "or_masks": _flexattn_or_masks,
}


# The code of these functions runs as that of torch's functions. Its globals are those of torch's module, which get the
# same names while flexattn is installed.


def _flex_attention(*args: Any, **kwargs: Any) -> Any:
    return _flexattn_flex_attention(*args, **kwargs)


def _create_block_mask(*args: Any, **kwargs: Any) -> Any:
    return _flexattn_create_block_mask(*args, **kwargs)


def _create_mask(*args: Any, **kwargs: Any) -> Any:
    return _flexattn_create_mask(*args, **kwargs)


def _and_masks(*args: Any, **kwargs: Any) -> Any:
    return _flexattn_and_masks(*args, **kwargs)


def _or_masks(*args: Any, **kwargs: Any) -> Any:
    return _flexattn_or_masks(*args, **kwargs)


_FORWARDING: dict[str, FunctionType] = {
    "flex_attention": _flex_attention,
    "create_block_mask": _create_block_mask,
    "create_mask": _create_mask,
    "and_masks": _and_masks,
    "or_masks": _or_masks,
}  # type: ignore[assignment]


@frozen
class _Replaced:
    """One name of torch's module, as it was before."""

    name: str
    found: Any
    code: CodeType | None  # None: not a plain function of torch, so that only the name is replaced
    defaults: tuple[Any, ...] | None
    keyword_defaults: dict[str, Any] | None

    @staticmethod
    def of(name: str) -> _Replaced:
        found = getattr(upstream, name)
        if not isinstance(found, FunctionType) or found.__module__ != upstream.__name__ or found.__closure__:
            return _Replaced(name, found, None, None, None)
        return _Replaced(name, found, found.__code__, found.__defaults__, found.__kwdefaults__)

    def replace(self) -> None:
        setattr(upstream, self.name, _OURS[self.name])
        if self.code is not None:
            setattr(upstream, f"_flexattn_{self.name}", _OURS[self.name])
            signature = inspect.signature(_OURS[self.name])
            self.found.__code__ = _FORWARDING[self.name].__code__
            self.found.__defaults__ = self.found.__kwdefaults__ = None
            self.found.__signature__ = signature

    def restore(self) -> None:
        if getattr(upstream, self.name, None) is _OURS[self.name]:  # otherwise other software replaced it since
            setattr(upstream, self.name, self.found)
        if self.code is not None:
            self.found.__code__ = self.code
            self.found.__defaults__, self.found.__kwdefaults__ = self.defaults, self.keyword_defaults
            del self.found.__signature__
            delattr(upstream, f"_flexattn_{self.name}")


_lock = Lock()
_numbers = count()  # of installations. An id may be that of an earlier one, which nobody kept
_users: set[int] = set()  # the numbers of installations that are not removed
_replaced: list[_Replaced] = []


class Installed:
    """flexattn in place of torch's functions, until `remove` is called or the `with` block ends.

    `holders` names what held a function of torch before, as "module.name". Calls through them use flexattn too.
    """

    holders: tuple[str, ...]
    _number: int

    def __init__(self) -> None:
        self._install()

    @uncompiled
    def _install(self) -> None:
        self._number = next(_numbers)
        with _lock:
            if not _users:
                _replaced[:] = [_Replaced.of(name) for name in _OURS]
                for replaced in _replaced:
                    replaced.replace()
            _users.add(self._number)
            self.holders = tuple(sorted(_holders({id(r.found): r.found for r in _replaced})))
        if self.holders:
            text = "torch's functions were imported before install_as_torch_flex, and forward to flexattn: %s"
            LOGGER.getChild("integrations").info(text, ", ".join(self.holders))

    @uncompiled
    def remove(self) -> None:
        """Restore torch's functions, unless another installation is still active. A second call does nothing.

        Example:
            >>> installed = install_as_torch_flex()
            >>> installed.remove()
        """
        with _lock:
            if self._number not in _users:
                return
            _users.remove(self._number)
            if not _users:
                while _replaced:
                    _replaced.pop().restore()

    def __enter__(self) -> Installed:
        if self._number not in _users:  # removed before
            self._install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = "active" if self._number in _users else "removed"
        return f"<flexattn as torch.nn.attention.flex_attention: {state}, {len(self.holders)} earlier imports>"


def install_as_torch_flex() -> Installed:
    """Let software that imports torch.nn.attention.flex_attention use flexattn.

    It replaces flex_attention, create_block_mask, create_mask, and_masks and or_masks, also where they were imported
    or given to torch.compile before. Classes, noop_mask and private names stay torch's. It may be called several times.
    Torch's functions are back when every installation is removed.

    Returns:
        An `Installed`: `remove()` undoes the call, and so does the end of a `with` block. `holders` names the modules
        that had imported torch's functions before.

    Example:
        >>> import torch
        >>> from torch.nn.attention import flex_attention as torch_flex
        >>> q = torch.randn(1, 2, 64, 32)
        >>> def causal(b, h, q_idx, kv_idx):
        ...     return q_idx >= kv_idx
        >>> with install_as_torch_flex():
        ...     mask = torch_flex.create_block_mask(causal, None, None, 64, 64, device="cpu")
        ...     out = torch_flex.flex_attention(q, q, q, block_mask=mask)
        >>> type(mask).__module__, out.shape
        ('flexattn.block_mask.mask', torch.Size([1, 2, 64, 32]))
    """
    return Installed()


def _holders(functions: dict[int, Any]) -> Iterator[str]:
    """Yield the names of modules' attributes that are functions of torch, or compiled forms of them."""
    modules = {id(module): (name, module) for name, module in reversed(list(sys.modules.items()))}  # without aliases
    for name, module in modules.values():
        if module is upstream:
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            # isinstance asks a value for its class, and some deprecated ones answer with a warning.
            compiled = vars(value).get("_torchdynamo_orig_callable") if type(value) is FunctionType else None
            if id(value) in functions or id(compiled) in functions:
                yield f"{name}.{attribute}"
