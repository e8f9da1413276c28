"""When gradients go to the servers: sync, half_async, async, geo, hybrid."""
