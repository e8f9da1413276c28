"""What every wing stands on: errors, roles, settings, storage, status and traces of a process."""
