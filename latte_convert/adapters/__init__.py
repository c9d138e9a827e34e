"""Where the attention modules of a library's models are, and how to take one over."""

from latte_convert.adapters.base import (
    Adapter,
    AttentionCall,
    AttentionSite,
    Handler,
    TokenLayout,
    enclosing_block,
    find_adapter,
    find_sites,
)

__all__ = [
    "Adapter",
    "AttentionCall",
    "AttentionSite",
    "Handler",
    "TokenLayout",
    "enclosing_block",
    "find_adapter",
    "find_sites",
]
