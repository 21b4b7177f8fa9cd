"""The plugin of verl, an entry point of group `verl.plugins`, which verl imports in each of its processes.

It does nothing unless the environment says `ROLECALL_AUTOSTART=1`, as `rolecall env` and `rolecall exec` write it: then
processes report. `ROLECALL_VERL_REPLACE` is apart from it: with an address, rollout replicas can be replaced there.
"""

import logging
import os

from rolecall.agent.autostart.environment import ENABLED

if os.environ.get(ENABLED) == "1":
    try:
        from rolecall.integrations.verl_processes import install

        install()
    except Exception as e:  # noqa: BLE001 verl goes on without it
        logging.getLogger(__name__).warning("rolecall sees nothing of this process: %s: %s", type(e).__name__, e)

if os.environ.get("ROLECALL_VERL_REPLACE"):
    try:
        from rolecall.integrations import verl_engines

        verl_engines.install(os.environ)
    except Exception as e:  # noqa: BLE001 verl goes on without it
        logging.getLogger(__name__).warning("rolecall replaces nothing of this job: %s: %s", type(e).__name__, e)
