"""What looks at jobs: the display of fleetrun, the dashboard, the `fleet` command, doctor and profile."""
