"""Which keys get a row, and which rows make room for others."""
