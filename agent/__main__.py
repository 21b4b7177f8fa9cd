"""`python -m rolecall.agent`: one node's agent."""

import sys

from rolecall.agent.daemon import main

if __name__ == "__main__":
    sys.exit(main())
