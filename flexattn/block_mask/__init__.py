"""BlockMask: which blocks of queries and keys are empty, full or partial, stored as runs of blocks."""

from flexattn.block_mask.from_torch import from_torch as from_torch
from flexattn.block_mask.mask import BlockMask as BlockMask
from flexattn.block_mask.mask import InTiles as InTiles
from flexattn.block_mask.record import BuildCounts as BuildCounts
from flexattn.block_mask.record import BuiltMask as BuiltMask
from flexattn.block_mask.record import Seen as Seen
from flexattn.block_mask.record import is_same as is_same
from flexattn.block_mask.record import seen as seen
from flexattn.block_mask.runs import LaterRunLists as LaterRunLists
from flexattn.block_mask.runs import RunLists as RunLists
from flexattn.block_mask.runs import Runs as Runs
from flexattn.block_mask.runs import run_lists as run_lists
from flexattn.block_mask.runs import run_lists_of as run_lists_of
