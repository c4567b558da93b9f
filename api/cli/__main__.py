"""`python -m baton.api.cli`: the command line."""

import sys

from baton.api.cli import main

sys.exit(main())
