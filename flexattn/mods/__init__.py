"""Ready masks and score mods, and combinators: plain functions of torch tensors.

A mask is `mask_mod(b, h, q_idx, kv_idx) -> bool`, a score mod is `score_mod(score, b, h, q_idx, kv_idx) -> score`.
`causal` and `noop_mask` are masks. All others are factories that return a mod: `sliding_window(1024)`.
"""

from flexattn.mods.alibi import alibi as alibi
from flexattn.mods.band import band as band
from flexattn.mods.block_diffusion import block_diffusion as block_diffusion
from flexattn.mods.causal import causal as causal
from flexattn.mods.causal import causal_lower_right as causal_lower_right
from flexattn.mods.combine import and_masks as and_masks
from flexattn.mods.combine import noop_mask as noop_mask
from flexattn.mods.combine import not_mask as not_mask
from flexattn.mods.combine import or_masks as or_masks
from flexattn.mods.combine import xor_masks as xor_masks
from flexattn.mods.dilated import dilated as dilated
from flexattn.mods.distance_decay import distance_decay as distance_decay
from flexattn.mods.document import document as document
from flexattn.mods.document import document_causal as document_causal
from flexattn.mods.global_tokens import global_tokens as global_tokens
from flexattn.mods.head_gate import head_gate as head_gate
from flexattn.mods.natten import natten_2d as natten_2d
from flexattn.mods.natten import natten_3d as natten_3d
from flexattn.mods.padding import padding as padding
from flexattn.mods.prefix_lm import prefix_lm as prefix_lm
from flexattn.mods.relative_bias import relative_bias as relative_bias
from flexattn.mods.shifted import shifted as shifted
from flexattn.mods.sliding_window import sliding_window as sliding_window
from flexattn.mods.softcap import softcap as softcap
from flexattn.mods.strided import strided as strided
from flexattn.mods.t5_bias import t5_bias as t5_bias
from flexattn.mods.temperature import temperature as temperature
from flexattn.mods.tree import tree as tree
