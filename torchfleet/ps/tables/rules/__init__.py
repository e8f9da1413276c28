"""The rules by which servers update rows and blocks. A new one is a class in a file of its own, and a line here."""

from torchfleet.ps.tables.rules.adagrad import Adagrad
from torchfleet.ps.tables.rules.adam import Adam
from torchfleet.ps.tables.rules.ftrl import Ftrl
from torchfleet.ps.tables.rules.lion import Lion
from torchfleet.ps.tables.rules.rmsprop import RmsProp
from torchfleet.ps.tables.rules.rowwise_adagrad import RowWiseAdagrad
from torchfleet.ps.tables.rules.sgd import Sgd
from torchfleet.ps.tables.settings.rule import RULES

RULES["sgd"] = Sgd()
RULES["adagrad"] = Adagrad()
RULES["adam"] = Adam()
RULES["rowwise_adagrad"] = RowWiseAdagrad()
RULES["ftrl"] = Ftrl()
RULES["rmsprop"] = RmsProp()
RULES["lion"] = Lion()
