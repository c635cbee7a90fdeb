"""`python -m zero_strategy.cli`."""

import sys

from zero_strategy.cli import main

sys.exit(main())
