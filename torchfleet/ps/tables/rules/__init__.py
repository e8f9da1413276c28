"""The rules by which servers update rows and blocks. A new one is a class in a file of its own, and a line here."""

from torchfleet.ps.tables.rules.adagrad import Adagrad
from torchfleet.ps.tables.rules.adam import Adam
from torchfleet.ps.tables.rules.sgd import Sgd
from torchfleet.ps.tables.settings.rule import RULES

RULES["sgd"] = Sgd()
RULES["adagrad"] = Adagrad()
RULES["adam"] = Adam()
