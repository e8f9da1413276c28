"""A job on one machine in virtual time: what it would do with more workers, servers and machines than there are."""
