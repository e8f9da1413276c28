"""Reports of a running process: status files for its launcher, progress lines for the user."""
