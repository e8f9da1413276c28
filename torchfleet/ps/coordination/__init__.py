"""Decides which server is primary of each shard: a coordinator keeps one small record per shard (compare-and-swap)."""
