"""Requests to the servers: which server has which key, what is under way, what is sent again."""
