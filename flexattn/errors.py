"""The exception classes. Each message names the argument, what was found, what was expected and the fix.

Each class also derives from the built-in exceptions that users of PyTorch's flex_attention already catch.
"""

from __future__ import annotations


class FlexAttentionError(Exception):
    """Base class of all errors that flexattn raises deliberately."""


class ArgumentError(FlexAttentionError, ValueError):
    """An argument has a value, shape or combination that cannot be computed."""


class DtypeError(FlexAttentionError, TypeError, ValueError):
    """An argument has a dtype or type that cannot be computed."""


class UnknownArgumentError(FlexAttentionError, TypeError):
    """A function has no such keyword argument. The message says what to write instead."""


class UnsupportedError(FlexAttentionError, NotImplementedError):
    """The request is meaningful, but flexattn does not support it."""


class OptionError(FlexAttentionError, ValueError, RuntimeError, AssertionError):
    """kernel_options contains an unknown name, an invalid value, or a contradictory combination."""


class DeviceError(FlexAttentionError, RuntimeError, ValueError):
    """Tensors are on different devices, or the device is not supported."""


class ModError(FlexAttentionError, RuntimeError, ValueError, AssertionError):
    """A score_mod or mask_mod cannot be traced. The message names the user's file and line, and a rewrite."""


class MaskError(FlexAttentionError, RuntimeError, ValueError, AssertionError):
    """A BlockMask is malformed, or was not built for these inputs."""


class MutationError(FlexAttentionError, RuntimeError):
    """A captured tensor was changed after something was computed from it."""


class IndexRangeError(FlexAttentionError, IndexError, RuntimeError):
    """An index is out of range for the tensor or mask that it indexes."""


class CacheFullError(FlexAttentionError, RuntimeError):
    """A paged cache has too few pages, or a sequence too many tokens. The cache has not changed."""


class CompileError(FlexAttentionError, RuntimeError):
    """A generated kernel could not be compiled or loaded on this device."""


class FormatError(FlexAttentionError, RuntimeError, ValueError):
    """Data that another version of flexattn wrote, or that is damaged."""


class RetraceWarning(UserWarning):
    """A score_mod or mask_mod is traced at each call because it reads something that a guard cannot compare."""


def mod_in_messages(kind: str, name: str) -> str:
    """Return the name of a mod in messages: "score_mod alibi", or "score_mod" if the function has no other name."""
    return f"{kind}_mod" if name == f"{kind}_mod" else f"{kind}_mod {name}"


def message(argument: str, found: object, expected: str, fix: str) -> str:
    """Return the text of an error: `argument` is `found`, expected `expected`, followed by the fix."""
    return f"{argument}: found {found}, expected {expected}. {fix}"
