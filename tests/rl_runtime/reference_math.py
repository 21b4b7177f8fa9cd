"""The algorithms once more, from their papers, in floats and loops: what the implementation's numbers are held against.

Nothing here uses tensors, padding, microbatches or divisors: an `Answer` is its lists of numbers, a loss is the
average that the paper writes, a gradient is what differentiating that line by hand gives.

    GRPO   2402.03300 eq. 3, 4   J = 1/G sum_i 1/|o_i| sum_t [ min(r A, clip(r) A) - b (pi_ref/pi - log pi_ref/pi - 1) ]
    Dr.GRPO 2503.20783           J = 1/G sum_i 1/L sum_t [ ... ],  A without division by the standard deviation
    DAPO   2503.14476 eq. 8-13   J = 1/sum_i|o_i| sum_i sum_t min(r A, clip(r) A),  soft punishment of length
    PPO    1707.06347 eq. 7, 9, 11; GAE 1506.02438 eq. 16     A_t = sum_k (gamma lambda)^k delta_{t+k}
    T-PPO  2506.15050            the same sum, of an answer cut at l, up to k = l-t-1, with a word for V(s_l)

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


def group_advantages(rewards: Floats, *, divide_by_std: bool) -> list[float]:
    """(R_i - mean) / std, of the whole group (it is the population, not a sample of one)."""
    mean = math.fsum(rewards) / len(rewards)
    if all(r == rewards[0] for r in rewards):
        return [0.0] * len(rewards)
    if not divide_by_std:
        return [r - mean for r in rewards]
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
    return [(r - mean) / std for r in rewards]


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
        deltas.append(reward + method.gamma * after - answer.values[t])
    return deltas


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
    """min(r A, clip(r) A), by its four cases. A ratio at a bound is inside: the bounds belong to the
    range."""
    low, high = 1 - method.clip_low, 1 + method.clip_high
    if advantage > 0 and ratio > high:
        return high * advantage, 0.0
    if advantage < 0 and ratio < low:
        return low * advantage, 0.0
    return ratio * advantage, ratio * advantage


def capped(ratio: float, advantage: float, method: Method) -> tuple[float, float]:
    """sg(min(r, C)) A log pi: REINFORCE with a truncated weight. The value reported is weight times advantage."""
    assert method.cap is not None
    weight = min(ratio, method.cap)
    return weight * advantage, weight * advantage


def divergence(logprob: float, reference: float) -> tuple[float, float]:
    """k3 = pi_ref/pi - log pi_ref/pi - 1; d/dlog pi = 1 - pi_ref/pi."""
    ratio = math.exp(reference - logprob)
    return ratio - (reference - logprob) - 1, 1 - ratio


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
            if not answer.trained[t]:
                continue
            gain = clipped if method.cap is None else capped
            value, slope = gain(math.exp(logprob - answer.sampler_logprobs[t]), worth[a][t], method)
            if method.entropy:
                value += method.entropy * answer.entropies[t]
            if method.kl:
                far, far_slope = divergence(logprob, answer.reference_logprobs[t])
                value, slope = value - method.kl * far, slope - method.kl * far_slope
            total -= weights[a][t] * value
            by_logprob[a][t] = -weights[a][t] * slope
            by_entropy[a][t] = -weights[a][t] * method.entropy
    value_loss, by_value = _critic(answers, method)
    return Step(policy=total, value=value_loss, by_logprob=by_logprob, by_entropy=by_entropy, by_value=by_value)


def token_advantages(groups: Sequence[Sequence[Answer]], method: Method) -> list[list[float]]:
    found = []
    for group in groups:
        if method.critic:
            found += [advantages(punished(a, method), method, method.lambda_policy) for a in group]
            continue
        rewards = [punished(a, method).reward for a in group]
        relative = group_advantages(rewards, divide_by_std=method.divide_by_std)
        found += [[r] * len(a.logprobs) for r, a in zip(relative, group, strict=True)]
    return found


def punished(answer: Answer, method: Method) -> Answer:
    if not method.overlong_buffer_tokens:
        return answer
    less = overlong(len(answer.logprobs), longest=method.overlong_longest, cache=method.overlong_buffer_tokens)
    return replace(answer, reward=answer.reward + less)


def _weights(groups: Sequence[Sequence[Answer]], method: Method) -> list[list[float]]:
    """Of each token in the loss, as the paper averages. |o_i| is the number of its tokens that are trained."""
    answers = [a for group in groups for a in group]
    tokens = sum(sum(a.trained) for a in answers)
    found = []
    for group in groups:
        for a in group:
            if method.aggregation == "sample":  # mean over groups, over samples, over tokens
                weight = 1 / len(groups) / len(group) / max(1, sum(a.trained))
            elif method.aggregation == "constant":
                weight = 1 / len(groups) / len(group) / method.longest
            else:
                weight = 1 / max(1, tokens)
            found.append([weight] * len(a.logprobs))
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
        for t, target in enumerate(returns(punished(answer, method), method)):
            off = answer.values[t] - target
            total += off * off / 2 / tokens
            by_value[a][t] = off / tokens
    return total, by_value
