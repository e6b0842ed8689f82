"""One family of errors: each message names the argument, what was found, what was expected and the mend.

Every class is also a built-in kind, the one that users of PyTorch's flex_attention already catch.
"""

from __future__ import annotations


class FlexAttentionError(Exception):
    """Any error that flexattn raises on purpose."""


class ArgumentError(FlexAttentionError, ValueError):
    """An argument has a value, shape or combination that cannot be computed."""


class DtypeError(FlexAttentionError, TypeError, ValueError):
    """An argument has a dtype or type that cannot be computed."""


class UnsupportedError(FlexAttentionError, NotImplementedError):
    """The request is meaningful, but flexattn has no way to do it."""


class OptionError(FlexAttentionError, ValueError, RuntimeError, AssertionError):
    """kernel_options holds a name or a value that means nothing, or a combination that contradicts itself."""


class DeviceError(FlexAttentionError, RuntimeError, ValueError):
    """Tensors that must live together are on different devices, or the device is not served."""


class ModError(FlexAttentionError, RuntimeError, ValueError, AssertionError):
    """A score_mod or mask_mod cannot be traced; the message names the user's file and line and the rewrite."""


class MaskError(FlexAttentionError, RuntimeError, ValueError, AssertionError):
    """A BlockMask is malformed, or was not made for these inputs."""


class MutationError(FlexAttentionError, RuntimeError):
    """A captured tensor was changed after something was computed from it."""


class IndexRangeError(FlexAttentionError, IndexError, RuntimeError):
    """An index lies outside of the tensor or mask that it indexes."""


class CompileError(FlexAttentionError, RuntimeError):
    """A generated kernel could not be built on this device."""


class RetraceWarning(UserWarning):
    """A score_mod or mask_mod is traced at each call, since it reads what cannot be compared between calls."""


def mod_in_messages(kind: str, name: str) -> str:
    """Return how messages name a mod: "score_mod alibi", or "score_mod" alone where the function has no name."""
    return f"{kind}_mod" if name == f"{kind}_mod" else f"{kind}_mod {name}"


def message(argument: str, found: object, expected: str, mend: str) -> str:
    """Return the text of an error: `argument` is `found`, expected `expected`; then how to mend it."""
    return f"{argument}: found {found}, expected {expected}. {mend}"
