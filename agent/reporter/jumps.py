"""Whether a number of the training left its own recent range: judged in the training process, where every value is seen.

A value jumps when it is further from the running mean m than `JUMP_DEVIATIONS` times the running mean deviation d, up or
down; d counts as at least `DEVIATION_MIN_RATIO` of |m|, and as `DEVIATION_MIN`. Both are means over about `NUM_REMEMBERED`
values, and the first of those judge nothing. A value beyond the limit is learned as the limit: one spike hardly moves
them, and a level that stays is normal after a while. It flags and never says why: a jump may be lawful.
"""

NUM_REMEMBERED = 32
JUMP_DEVIATIONS = 12.0
"""Of normal noise these are about ten standard deviations; gradient norms have longer tails."""
DEVIATION_MIN_RATIO = 0.01
"""What hardly moves (a reward of 0.99) does not jump by a tenth of itself."""
DEVIATION_MIN = 1e-6
"""Of what was always 0; without it nothing would ever be learned."""
VALUE_MAX = 1e100
"""Larger ones count as this: no sum here overflows."""


class OutlierDetector:
    """Of one number. Mutable; used under the page's lock."""

    __slots__ = ("_deviation", "_mean", "_num")

    def __init__(self) -> None:
        self._mean = self._deviation = 0.0
        self._num = 0

    def jumps(self, value: float) -> bool:
        """Whether this finite value jumps; it is learned."""
        if not -VALUE_MAX <= value <= VALUE_MAX:
            value = VALUE_MAX if value > 0 else -VALUE_MAX
        num, d = self._num, self._deviation
        m = self._mean if num else value
        away = value - m if value >= m else m - value
        jumped = False
        # The floors of d are asked only of what its own past does not excuse: this runs inside every report.
        if num >= NUM_REMEMBERED and away > JUMP_DEVIATIONS * d:
            limit = JUMP_DEVIATIONS * max(d, DEVIATION_MIN_RATIO * abs(m), DEVIATION_MIN)
            if jumped := away > limit:
                value, away = (m + limit if value > m else m - limit), limit
        if num < NUM_REMEMBERED:
            self._num = num = num + 1
        self._mean = m + (value - m) / num
        self._deviation = d + (away - d) / num
        return jumped
