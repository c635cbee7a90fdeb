"""Training that goes on in the same processes when some of them die, and takes new ones in.

membership    who is there: torchft's lighthouse, asked at the end of each step
formation     a process group of those who are there
copies        the state after each of the last two steps, in memory that outlives a process
run           the training function, called again in this process when ranks have changed
"""

from zero_strategy.survive.formation import when_formed
from zero_strategy.survive.run import Run, survive

__all__ = ["Run", "survive", "when_formed"]
