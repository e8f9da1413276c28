"""Simulates a job on one machine in virtual time, with more workers, servers and machines than are available."""
