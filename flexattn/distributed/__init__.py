"""distributed: attention over sequences that are sharded over ranks, and of DTensors (docs/distributed.md)."""

from flexattn.distributed.attention import flex_attention
from flexattn.distributed.plan import Chunk, ContextPlan, create_cp_plan

__all__ = ["Chunk", "ContextPlan", "create_cp_plan", "flex_attention"]
