"""Fleets in virtual time: schedules of faults from one seed, and checks over all that was said and read."""
