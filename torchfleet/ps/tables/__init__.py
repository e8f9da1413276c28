"""What a server keeps: rows by key and dense blocks, with their optimizers."""

# A description names its kind and its rule: both registries are full before anybody can make one.
from torchfleet.ps.tables import kinds as kinds
from torchfleet.ps.tables import rules as rules
