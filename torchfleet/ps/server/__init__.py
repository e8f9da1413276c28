"""The server: a loop, a table of commands, and the tables they work on. Imports no torch."""
