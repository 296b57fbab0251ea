"""Run the command line by `python -m slipstream`, where no script of this name is on the path."""

import sys

from slipstream.cli import main

sys.exit(main())
