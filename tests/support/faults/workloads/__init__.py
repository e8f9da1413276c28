"""What clients do in a schedule, and what must hold in the end."""
