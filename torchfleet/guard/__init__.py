"""What comes from other users, processes and files, made harmless."""
