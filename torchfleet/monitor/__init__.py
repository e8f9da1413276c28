"""What a process tells of itself: status files and progress lines."""
