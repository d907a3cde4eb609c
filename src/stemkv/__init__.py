"""stemkv."""
