"""Fleets in virtual time: whole schedules of faults from one seed, and checks over everything that was said and read."""
