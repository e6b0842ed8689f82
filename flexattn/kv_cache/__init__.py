"""kv_cache: a paged cache of keys and values for flex_attention and varlen_attn.

page_pool counts pages on the host, cache updates the tensors on the device, append writes new tokens.
"""

from flexattn.kv_cache.cache import PagedKVCache as PagedKVCache
