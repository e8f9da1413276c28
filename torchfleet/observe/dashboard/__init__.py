"""The web page of a job: its record as charts, tables and logs, over HTTP."""
