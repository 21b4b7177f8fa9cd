"""Outlier detection for training metrics, inside the training process, which sees every value.

A value jumps when its distance from the running mean m exceeds `JUMP_DEVIATIONS` times the running mean deviation d; d
is at least `DEVIATION_MIN_RATIO` of |m| and `DEVIATION_MIN`. Both are means over about `NUM_REMEMBERED` values; the
first `NUM_REMEMBERED` values only train them. A value beyond the limit is learned as the limit, so that one spike
hardly moves the means and a lasting new level becomes normal. A jump is a flag without a cause, and may be legitimate.
"""

NUM_REMEMBERED = 32
JUMP_DEVIATIONS = 12.0
"""About ten standard deviations of normal noise; gradient norms have longer tails."""
DEVIATION_MIN_RATIO = 0.01
"""For nearly constant values (a reward of 0.99)."""
DEVIATION_MIN = 1e-6
"""For a value that was always 0, which could otherwise never be learned."""
VALUE_MAX = 1e100
"""Larger values are clamped, so that no sum overflows."""


class OutlierDetector:
    """For one metric. Mutable; used under the page's lock."""

    __slots__ = ("_deviation", "_mean", "_num")

    def __init__(self) -> None:
        self._mean = self._deviation = 0.0
        self._num = 0

    def jumps(self, value: float) -> bool:
        """Whether this finite value is an outlier; learns it."""
        if not -VALUE_MAX <= value <= VALUE_MAX:
            value = VALUE_MAX if value > 0 else -VALUE_MAX
        num, deviation = self._num, self._deviation
        mean = self._mean if num else value
        away = value - mean if value >= mean else mean - value
        jumped = False
        # The floors of d are evaluated only beyond the cheap test: this runs inside every report.
        if num >= NUM_REMEMBERED and away > JUMP_DEVIATIONS * deviation:
            limit = JUMP_DEVIATIONS * max(deviation, DEVIATION_MIN_RATIO * abs(mean), DEVIATION_MIN)
            if jumped := away > limit:
                value, away = (mean + limit if value > mean else mean - limit), limit
        if num < NUM_REMEMBERED:
            self._num = num = num + 1
        self._mean = mean + (value - mean) / num
        self._deviation = deviation + (away - deviation) / num
        return jumped
