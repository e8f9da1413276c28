"""What a server has promised, as a stream of entries: written to disk, sent to another server, applied again."""
