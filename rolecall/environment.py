"""What an environment of several turns is made of: `from rolecall.environment import Step`. Standard library only.

class Echo:
    async def reset(self, prompt: str, seed: int) -> None: ...

    async def step(self, response: str) -> Step:
        return Step(observation=response, reward=float(len(response)), done="stop" in response)
"""

from rolecall.rl_runtime.tasks.environments.interface import Environment, Opening, Step

__all__ = ["Environment", "Opening", "Step"]
