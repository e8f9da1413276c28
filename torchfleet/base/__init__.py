"""The modules that all other packages use: errors, roles, settings, storage, status reports and traces of a process."""
