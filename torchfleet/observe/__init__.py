"""Tools that observe jobs: the display of fleetrun, the dashboard, the `fleet` command, doctor and profile."""
