"""Token advantages from a critic, and the overlong penalty. Group-relative advantages: `group_relative.py`.

    GAE (PPO)            d_t = r_t + gamma V(s_t+1) - V(s_t),  A_t = sum_k (gamma lambda)^k d_t+k    1506.02438 eq. 16
    EGAE (T-PPO)         the same sum up to the cut of an unfinished answer, 2506.15050 sec. 3
    overlong (DAPO)      0 up to Lmax - Lcache, then linearly down to -1 at Lmax and beyond, 2503.14476 eq. 13

The state s_t is the prompt and the tokens before o_t; V(s_t) is the critic's output before o_t is chosen. The value
after the last token of a finished answer is 0. After a cut it is the *bootstrap* value, the only difference between GAE
and EGAE. Pure; tensors keep their dtype.
"""

import torch
from torch import Tensor


def overlong_penalty(length: int, *, longest: int, cache: int) -> float:
    """In [-1, 0] for a response of `length` tokens; `cache` 0 disables it.

    At exactly `longest` the linear piece has reached -1; DAPO's third piece begins after it with the same value.
    """
    if cache == 0 or length <= longest - cache:
        return 0.0
    return -min(1.0, (length - (longest - cache)) / cache)


def gae(
    rewards_st: Tensor, values_st: Tensor, response_st: Tensor, bootstrap_s: Tensor, *, gamma: float, decay: float
) -> Tensor:
    """Advantages (S, T), 0 outside the response.

    Args:
        rewards_st: reward given for token t.
        values_st: V(s_t), of the state in which token t was chosen.
        response_st: 1 where token t was generated; one run of ones a row.
        bootstrap_s: value of the state after the last token: 0 where the answer is finished.
        gamma: discount. decay: lambda.
    """
    advantage = torch.zeros_like(bootstrap_s)
    after = bootstrap_s
    columns: list[Tensor] = []
    for t in range(values_st.shape[1] - 1, -1, -1):
        here = response_st[:, t] > 0
        difference = rewards_st[:, t] + gamma * after - values_st[:, t]
        summed = difference + gamma * decay * advantage
        # After the response, the state is constant: its last token sees the bootstrap value and a zero advantage.
        advantage = torch.where(here, summed, torch.zeros_like(summed))
        after = torch.where(here, values_st[:, t], bootstrap_s)
        columns.append(advantage)
    return torch.stack(columns[::-1], dim=1)


def last_of(values_st: Tensor, response_st: Tensor) -> Tensor:
    """Value at each row's last response token, shape (S,); 0 for a row without response tokens."""
    positions = torch.arange(values_st.shape[1], device=values_st.device).expand_as(values_st)
    last = torch.where(response_st > 0, positions, torch.full_like(positions, -1)).max(dim=1).values
    found = values_st.gather(1, last.clamp(min=0).unsqueeze(1)).squeeze(1)
    return torch.where(last >= 0, found, torch.zeros_like(found))
