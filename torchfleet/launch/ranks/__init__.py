"""The launcher of collective jobs: ranks, how they meet, and how they start again after a failure."""
