"""The plugin of verl, an entry point of group `verl.plugins`, which verl imports in each of its processes.

It does nothing unless the environment says `ROLECALL_AUTOSTART=1`, as `rolecall env` and `rolecall exec` write it.
"""

import os

from rolecall.agent.autostart.environment import ENABLED

if os.environ.get(ENABLED) == "1":
    from rolecall.integrations.verl_processes import install

    install()
