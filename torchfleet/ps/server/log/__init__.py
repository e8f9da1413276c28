"""The log of a server: a stream of entries that is written to disk, sent to another server, and replayed."""
