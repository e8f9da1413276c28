"""What the `fleet` command does."""
