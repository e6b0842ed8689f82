"""score_reductions: refuses reductions over the score, which is one number and not a row or a matrix.

PyTorch computes them on 0-d tensors: `score.sum()` is the score, and `torch.softmax(score, -1)` is 1. The result of the
mod would then be wrong without an error.
"""

from __future__ import annotations

from torch import Tensor, fx

from flexattn.errors import ModError, message
from flexattn.trace.interception import line_of_node
from flexattn.trace.operator_calls import operator_name

_SOFTMAX = "flex_attention applies the softmax over the keys itself: return the score before the softmax."
_LSE = "flex_attention returns it for each row with return_aux=AuxRequest(lse=True)."
_EXTREME = (
    "The softmax subtracts the maximum of each row itself, and return_aux=AuxRequest(max_scores=True) returns it. "
    "To limit a score, write score.clamp(low, high)."
)
_TOTAL = "Compute a value for each row before the call, capture it as a tensor, and index it: value[b, h, q_idx]."
_ORDER = "Decide before the call which keys are kept, and capture a bool tensor: kept[b, h, q_idx, kv_idx]."

# What to do instead, by the operator without overload.
FIXES = {
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax"), _SOFTMAX),
    **dict.fromkeys(("logsumexp", "logcumsumexp"), _LSE),
    **dict.fromkeys(("max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "cummax", "cummin"), _EXTREME),
    **dict.fromkeys((
        "sum", "nansum", "mean", "nanmean", "prod", "cumsum", "cumprod", "var", "std", "var_mean", "std_mean",
        "linalg_vector_norm", "norm", "any", "all", "median", "nanmedian", "mode", "count_nonzero",
    ), _TOTAL),
    **dict.fromkeys(("sort", "argsort", "topk", "kthvalue"), _ORDER),
}  # fmt: skip


def refuse_score_reductions(graph: fx.Graph, inputs: dict[fx.Node, str], name: str, location: str) -> None:
    """Raise a ModError if an operator reduces one number that is computed from the score.

    Call it with a graph as the user wrote it: decompositions of other operators may reduce 0-d tensors. `location` of
    the mod is named where the line is not known, because torch.compile has generated the code.
    """
    suspects = [node for node in graph.nodes if _reduces_one_number(node)]
    if not suspects:
        return
    scores = {node for node, of in inputs.items() if of == "score"}
    for node in graph.nodes:
        if not scores.isdisjoint(node.all_input_nodes):
            scores.add(node)
    for node in suspects:
        if node in scores:
            what = operator_name(node).lstrip("_").removeprefix("linalg_vector_")
            line = line_of_node(node)
            found = f"{what} over the score at {location if location and line.startswith('<') else line}"
            expected = "elementwise operations: score is one number (0-d), that of one query and one key"
            raise ModError(message(name, found, expected, FIXES[operator_name(node)]))


def _reduces_one_number(node: fx.Node) -> bool:
    """Return whether a node is a reduction of a 0-d tensor. torch.max(x, y) is none."""
    if node.op != "call_function" or operator_name(node) not in FIXES:
        return False
    tensors = [v for v in (n.meta.get("val") for n in node.all_input_nodes) if isinstance(v, Tensor)]
    return len(tensors) == 1 and tensors[0].dim() == 0
