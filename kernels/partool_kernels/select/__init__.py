"""Selection of the fastest correct implementation of an operation, by timing all of them on the device."""

from partool_kernels.select.selector import Answer as Answer
from partool_kernels.select.selector import Candidate as Candidate
from partool_kernels.select.selector import NothingWorksError as NothingWorksError
from partool_kernels.select.selector import Question as Question
from partool_kernels.select.selector import Selector as Selector
from partool_kernels.select.store import Store as Store
