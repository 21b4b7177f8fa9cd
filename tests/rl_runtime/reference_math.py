"""The algorithms once more, from their papers, in floats and loops: what the implementation's numbers are held against.

Nothing here uses tensors, padding, microbatches or divisors: an `Answer` is its lists of numbers, a loss is the
average that the paper writes, a gradient is what differentiating that line by hand gives.

    GRPO   2402.03300 eq. 3, 4   J = 1/G sum_i 1/|o_i| sum_t [ min(r A, clip(r) A) - b (pi_ref/pi - log pi_ref/pi - 1) ]
    Dr.GRPO 2503.20783           J = 1/G sum_i 1/L sum_t [ ... ],  A without division by the standard deviation
    DAPO   2503.14476 eq. 8-13   J = 1/sum_i|o_i| sum_i sum_t min(r A, clip(r) A),  soft punishment of length
    PPO    1707.06347 eq. 7, 9, 11; GAE 1506.02438 eq. 16     A_t = sum_k (gamma lambda)^k delta_{t+k}
    T-PPO  2506.15050            the same sum, of an answer cut at l, up to k = l-t-1, with a word for V(s_l)
    GSPO   2507.18071 eq. 5-7    J = 1/G sum_i min(s A, clip(s) A),  s = (pi(o)/pi_old(o))^(1/|o|)
    CISPO  2506.13585 eq. 4, 5   J = 1/sum_i|o_i| sum_i sum_t sg(min(r, C)) A log pi
    RLOO   2402.14740            A_i = R_i - mean of the other rewards
    REINFORCE++ 2501.03262       A = (R - mean R) / std R over the step; with the group's mean subtracted first: baseline
    dual clip 1912.09729         max(min(r A, clip(r) A), c A) for A < 0
    decoupled 2505.24298         pi_old/pi_sampler min(r A, clip(r) A),  r = pi/pi_old;  the weight truncated
    PPO2 (value clip)            max((V - R)^2, (V_old + clip(V - V_old, -e, e) - R)^2) / 2
    k1, k2, k3                   Schulman's note on approximating KL divergence; k1 in the reward: 2203.02155 eq. 2

Which tokens count is part of what is stated: `Answer.trained` for the policy, an answer that is over for the critic.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Floats = Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One response of T tokens. `values` has T + 1: of the state before each token, and of the one behind the last."""

    logprobs: Floats
    sampler_logprobs: Floats
    trained: Sequence[bool]
    reward: float = 0.0
    cut: bool = False
    values: Floats = ()
    entropies: Floats = ()
    reference_logprobs: Floats = ()
    old_logprobs: Floats = ()  # before the step's first update; none: this is the first
    old_values: Floats = ()
    frozen_logprobs: Floats = ()  # those behind sg(); none: `logprobs`

    @property
    def held(self) -> Floats:
        return self.frozen_logprobs or self.logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """An algorithm's settings that are in the equations."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    cap: float | None = None
    aggregation: Literal["sample", "constant", "token"] = "token"
    longest: int = 1
    divide_by_std: bool = True
    overlong_longest: int = 0
    overlong_buffer_tokens: int = 0
    entropy: float = 0.0
    kl: float = 0.0
    critic: bool = False
    gamma: float = 1.0
    lambda_policy: float = 1.0
    lambda_value: float = 1.0
    truncation_value: Literal["critic", "previous"] = "critic"
    dual_clip: float | None = None
    baseline: str = "group"
    normalized: bool = False
    bessel: bool = False
    whole_ratio: bool = False
    whole_weight: bool = False
    kl_estimator: str = "k3"
    kl_in_reward: bool = False
    kl_max: float = math.inf
    old_weight_cap: float = math.inf
    rejection: str = "none"
    rejection_low: float = 0.0
    rejection_high: float = math.inf
    value_clip: float | None = None


# --- softmax


def log_softmax(logits: Floats) -> list[float]:
    top = max(logits)
    total = math.log(math.fsum(math.exp(z - top) for z in logits)) + top
    return [z - total for z in logits]


def entropy(logits: Floats) -> float:
    return -math.fsum(math.exp(p) * p for p in log_softmax(logits))


def logprob_gradient(logits: Floats, token: int) -> list[float]:
    """d log p(token) / d logits = onehot - p."""
    return [(1.0 if j == token else 0.0) - math.exp(p) for j, p in enumerate(log_softmax(logits))]


def entropy_gradient(logits: Floats) -> list[float]:
    """dH / d logits_j = -p_j (log p_j + H)."""
    h = entropy(logits)
    return [-math.exp(p) * (p + h) for p in log_softmax(logits)]


# --- what a sample earns


def overlong(length: int, *, longest: int, cache: int) -> float:
    """DAPO eq. 13, its three pieces."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


def group_advantages(rewards: Floats, *, divide_by_std: bool, bessel: bool = False) -> list[float]:
    """(R_i - mean) / std, of the whole group: it is the population, or with Bessel's correction a sample of one."""
    mean = math.fsum(rewards) / len(rewards)
    if all(r == rewards[0] for r in rewards):
        return [0.0] * len(rewards)
    if not divide_by_std:
        return [r - mean for r in rewards]
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - (1 if bessel else 0)))
    return [(r - mean) / std for r in rewards]


def sample_advantages(groups: Sequence[Floats], method: Method) -> list[list[float]]:
    """Of each sample, from the rewards of a whole step."""
    found: list[list[float]] = []
    for rewards in groups:
        if method.baseline == "none":
            found.append(list(rewards))
        elif method.baseline == "others":
            rows = [[other for j, other in enumerate(rewards) if j != i] for i in range(len(rewards))]
            means = [math.fsum(others) / len(others) if others else rewards[0] for others in rows]
            found.append([r - mean for r, mean in zip(rewards, means, strict=True)])
        else:
            found.append(group_advantages(rewards, divide_by_std=method.divide_by_std, bessel=method.bessel))
    if not method.normalized:
        return found
    flat = group_advantages([a for group in found for a in group], divide_by_std=True, bessel=method.bessel)
    return [[flat.pop(0) for _ in group] for group in found]


def temporal_differences(answer: Answer, method: Method) -> list[float]:
    """delta_t = r_t + gamma V(s_{t+1}) - V(s_t). The reward comes with the last token of an answer that is over."""
    last = len(answer.logprobs) - 1
    deltas = []
    for t in range(last + 1):
        reward, after = 0.0, answer.values[t + 1]
        if t == last and not answer.cut:
            reward, after = answer.reward, 0.0
        elif t == last and method.truncation_value == "previous":
            after = answer.values[t]
        if method.kl_in_reward:
            reward -= method.kl * strayed(answer, t, method)
        deltas.append(reward + method.gamma * after - answer.values[t])
    return deltas


def strayed(answer: Answer, t: int, method: Method) -> float:
    """k1 of the sampler against the reference, of one token."""
    return min(max(answer.sampler_logprobs[t] - answer.reference_logprobs[t], -method.kl_max), method.kl_max)


def advantages(answer: Answer, method: Method, lam: float) -> list[float]:
    """GAE as the explicit sum of its definition; of a cut at l it ends at k = l - t - 1 (EGAE)."""
    deltas = temporal_differences(answer, method)
    decay = method.gamma * lam
    return [math.fsum(decay**k * deltas[t + k] for k in range(len(deltas) - t)) for t in range(len(deltas))]


def returns(answer: Answer, method: Method) -> list[float]:
    """The critic's targets: advantage at lambda_value, plus its own value."""
    return [a + v for a, v in zip(advantages(answer, method, method.lambda_value), answer.values, strict=False)]


# --- one token: value, and derivative with respect to its log-probability


def clipped(ratio: float, advantage: float, method: Method) -> tuple[float, float]:
    """max(min(r A, clip(r) A), c A if A < 0), by its five cases. A ratio at a bound is inside: the bounds belong to the
    range."""
    low, high = 1 - method.clip_low, 1 + method.clip_high
    if advantage < 0 and method.dual_clip is not None and ratio > method.dual_clip:
        return method.dual_clip * advantage, 0.0
    if advantage > 0 and ratio > high:
        return high * advantage, 0.0
    if advantage < 0 and ratio < low:
        return low * advantage, 0.0
    return ratio * advantage, ratio * advantage


def divergence(logprob: float, reference: float, estimator: str = "k3") -> tuple[float, float]:
    """k3 = pi_ref/pi - log pi_ref/pi - 1; d/dlog pi = 1 - pi_ref/pi. k2 = (log pi/pi_ref)^2 / 2."""
    if estimator == "k2":
        return (logprob - reference) ** 2 / 2, logprob - reference
    ratio = math.exp(reference - logprob)
    return ratio - (reference - logprob) - 1, 1 - ratio


def mismatch(answer: Answer, t: int) -> float:
    """log pi_old - log pi_sampler; pi_old is the present policy at the first update."""
    old = answer.old_logprobs or answer.held
    return old[t] - answer.sampler_logprobs[t]


def geometric_mismatch(answer: Answer) -> float:
    trained = [mismatch(answer, t) for t, on in enumerate(answer.trained) if on]
    return math.exp(math.fsum(trained) / len(trained))


def kept(answer: Answer, method: Method) -> list[bool]:
    """Trained, and not rejected."""
    trained = [t for t, on in enumerate(answer.trained) if on]
    if method.rejection == "none" or not trained:
        return list(answer.trained)
    found = [False] * len(answer.trained)
    for t in trained:
        judged = math.exp(mismatch(answer, t)) if method.rejection == "token" else geometric_mismatch(answer)
        found[t] = method.rejection_low <= judged <= method.rejection_high
    return found


def weight(answer: Answer, t: int, method: Method) -> float:
    """pi / pi_sampler, of the token or of all trained ones together; not truncated yet."""
    moved = [held - made for held, made in zip(answer.held, answer.sampler_logprobs, strict=True)]
    if method.whole_weight:
        return math.exp(math.fsum(m for m, on in zip(moved, answer.trained, strict=True) if on))
    return math.exp(moved[t])


def clip_ratio(answer: Answer, t: int, method: Method) -> float:
    """pi / pi_old of a token, or its geometric mean over the trained ones; pi_old is the sampler at the first update."""
    old = answer.old_logprobs or answer.sampler_logprobs
    if not method.whole_ratio:
        return math.exp(answer.logprobs[t] - old[t])
    moved = [p - q for p, q, on in zip(answer.logprobs, old, answer.trained, strict=True) if on]
    return math.exp(math.fsum(moved) / len(moved))


def gain(answer: Answer, t: int, advantage: float, method: Method) -> tuple[float, float]:
    """Of a token of an answer whose tokens weigh the same, so that the slope of a whole ratio is shared out evenly."""
    if method.cap is not None:
        truncated = min(weight(answer, t, method), method.cap)
        value = truncated * advantage * math.exp(answer.logprobs[t] - answer.held[t])
        return value, value
    value, slope = clipped(clip_ratio(answer, t, method), advantage, method)
    if answer.old_logprobs:
        old = math.exp(mismatch(answer, t))
        if method.whole_ratio:
            old = geometric_mismatch(answer)
        truncated = min(old, method.old_weight_cap)
        return truncated * value, truncated * slope
    return value, slope


# --- a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Losses, and per answer and token: the loss's derivative by log-probability, entropy and value."""

    policy: float
    value: float
    by_logprob: list[list[float]]
    by_entropy: list[list[float]]
    by_value: list[list[float]]  # T + 1 of them: the state behind the last token gets none


def step(groups: Sequence[Sequence[Answer]], method: Method) -> Step:
    answers = [a for group in groups for a in group]
    worth = token_advantages(groups, method)
    weights = _weights(groups, method)
    total, by_logprob, by_entropy = 0.0, [], []
    for a, answer in enumerate(answers):
        by_logprob.append([0.0] * len(answer.logprobs))
        by_entropy.append([0.0] * len(answer.logprobs))
        for t, logprob in enumerate(answer.logprobs):
            if not weights[a][t]:
                continue
            value, slope = gain(answer, t, worth[a][t], method)
            if method.entropy:
                value += method.entropy * answer.entropies[t]
            if method.kl and not method.kl_in_reward:
                far, far_slope = divergence(logprob, answer.reference_logprobs[t], method.kl_estimator)
                if far > method.kl_max:
                    far, far_slope = method.kl_max, 0.0
                value, slope = value - method.kl * far, slope - method.kl * far_slope
            total -= weights[a][t] * value
            by_logprob[a][t] = -weights[a][t] * slope
            by_entropy[a][t] = -weights[a][t] * method.entropy
    value_loss, by_value = _critic(answers, method)
    return Step(policy=total, value=value_loss, by_logprob=by_logprob, by_entropy=by_entropy, by_value=by_value)


def token_advantages(groups: Sequence[Sequence[Answer]], method: Method) -> list[list[float]]:
    if method.critic:
        judged = [valued(punished(a, method)) for group in groups for a in group]
        return [advantages(a, method, method.lambda_policy) for a in judged]
    rewards = [[punished(a, method).reward for a in group] for group in groups]
    if method.kl_in_reward:
        for group, earned in zip(groups, rewards, strict=True):
            for i, a in enumerate(group):
                earned[i] -= method.kl * math.fsum(strayed(a, t, method) for t in range(len(a.logprobs)))
    by_sample = sample_advantages(rewards, method)
    return [
        [worth] * len(a.logprobs)
        for group, of_group in zip(groups, by_sample, strict=True)
        for a, worth in zip(group, of_group, strict=True)
    ]


def valued(answer: Answer) -> Answer:
    """With the values that advantages and returns are built from: the critic's before the step's first update."""
    return replace(answer, values=answer.old_values or answer.values)


def punished(answer: Answer, method: Method) -> Answer:
    if not method.overlong_buffer_tokens:
        return answer
    less = overlong(len(answer.logprobs), longest=method.overlong_longest, cache=method.overlong_buffer_tokens)
    return replace(answer, reward=answer.reward + less)


def _weights(groups: Sequence[Sequence[Answer]], method: Method) -> list[list[float]]:
    """Of each token in the loss, as the paper averages. |o_i| is the number of its tokens that are trained."""
    tokens = sum(sum(kept(a, method)) for group in groups for a in group)
    found = []
    for group in groups:
        for a in group:
            counted = kept(a, method)
            if method.aggregation == "sample":  # mean over groups, over samples, over tokens
                each = 1 / len(groups) / len(group) / max(1, sum(counted))
            elif method.aggregation == "constant":
                each = 1 / len(groups) / len(group) / method.longest
            else:
                each = 1 / max(1, tokens)
            found.append([each if on else 0.0 for on in counted])
    return found


def _critic(answers: Sequence[Answer], method: Method) -> tuple[float, list[list[float]]]:
    """Mean of (V - return)^2 / 2 over all tokens of answers that are over; the return is constant."""
    by_value = [[0.0] * (len(a.logprobs) + 1) for a in answers]
    if not method.critic:
        return 0.0, by_value
    tokens = sum(len(a.logprobs) for a in answers if not a.cut)
    total = 0.0
    for a, answer in enumerate(answers):
        if answer.cut:
            continue
        for t, target in enumerate(returns(valued(punished(answer, method)), method)):
            off, slope = answer.values[t] - target, 1.0
            if method.value_clip is not None and answer.old_values:
                old = answer.old_values[t]
                held = min(max(answer.values[t], old - method.value_clip), old + method.value_clip)
                if (held - target) ** 2 > off**2:
                    off, slope = held - target, 0.0 if held != answer.values[t] else 1.0
            total += off * off / 2 / tokens
            by_value[a][t] = off * slope / tokens
    return total, by_value
