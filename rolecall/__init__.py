"""rolecall: diagnosis-first fault tolerance for LLM RL post-training."""

__version__ = "0.1.0"
