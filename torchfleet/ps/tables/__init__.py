"""What a server keeps: rows by key and dense blocks, with their optimizers."""

# A description names its kind and its rule, so both registries are filled here, before a description can be made.
from torchfleet.ps.tables import kinds as kinds
from torchfleet.ps.tables import rules as rules
