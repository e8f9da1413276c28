"""How fast replicas notice each other's end, in seconds."""

BEAT = 0.2  # between two signs of life of a primary, which its backup answers
SILENCE = 0.65  # of a primary, after which its backup takes over
LEASE = 0.5  # for which a primary may count on its backup not to have done so, from the sign that was answered
PATIENCE = 1.5  # of a primary with a silent backup, on which all acknowledgements wait; then it goes on alone
GIVE_UP = 10.0  # the same of both while the backup is being filled, and nobody waits for it
OWN_PAUSE = 0.4  # between two looks at the clock; in what is longer this process stood still, not the other
FAREWELL = 2.0  # for which one that took over at the very end of a job waits for those who ask again

assert LEASE < SILENCE
