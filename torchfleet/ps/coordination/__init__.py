"""Who is primary of which shard: decided in one place, by comparing and swapping small records."""
