"""``python -m st_aggretriever``."""

import sys

from st_aggretriever.cli import main

if __name__ == "__main__":
    sys.exit(main())
