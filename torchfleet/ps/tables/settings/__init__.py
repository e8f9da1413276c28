"""What a table is told to be: its description, its policies, its clock, who owns which key."""
