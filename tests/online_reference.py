"""The specification of the online advantages and losses: plain loops over rows and tokens in float64.

Legend: B rows, R response columns. Arguments are as in megarlhf/algorithms; `lengths` are the responses' tokens.
"""

from __future__ import annotations

import math


def mean(values):
    return sum(values) / len(values)


def lengths_of(mask):
    return [int(row.sum()) for row in mask]


def shaped_score(score, length, limit, shaping):
    """Less the length penalty and DAPO's (arXiv:2503.14476, eq. 13)."""
    score -= shaping.length_penalty * length
    start = limit - shaping.overlong_buffer
    if shaping.overlong_buffer and length > start:
        score -= shaping.overlong_penalty * (length - start) / shaping.overlong_buffer
    return score


def returns_to_go(rewards, gamma):
    return [sum(gamma ** (u - t) * reward for u, reward in enumerate(rewards) if u >= t) for t, _ in enumerate(rewards)]


def advantages_of_row(rewards, values, gamma, lam):
    """GAE by its definition: sum_k (gamma lam)^k delta_{t+k}."""
    values = [*values, 0.0]
    deltas = [reward + gamma * values[t + 1] - values[t] for t, reward in enumerate(rewards)]
    return returns_to_go(deltas, gamma * lam)


def of_group(name, scores, group_ids, row, eps):
    """(the advantage of a row within its group, the weight of its own score in it)."""
    own = scores[row]
    others = [s for r, (s, g) in enumerate(zip(scores, group_ids, strict=True)) if g == group_ids[row] and r != row]
    size = len(others) + 1
    if name == "rloo":
        return own - mean(others), 1.0
    middle = mean([own, *others])
    if name == "dr_grpo":
        return own - middle, (size - 1) / size
    deviation = math.sqrt(sum((s - middle) ** 2 for s in [own, *others]) / (size - 1))
    if all(s == own for s in others):
        return 0.0, 0.0
    return (own - middle) / (deviation + eps), (size - 1) / size / (deviation + eps)


def advantages(given, config, *, kl_coef, baseline, greedy):
    """(B, R) nested lists of `given`'s arrays by name -> a list of each row's advantages. `exact`: the exact KL."""
    lengths, group_ids = lengths_of(given["mask"]), given["group_ids"].tolist()
    limit = given["mask"].shape[1]
    penalty, own = [], []  # of tokens: in the rewards, and beside them
    for row, length in enumerate(lengths):
        k1 = [(given["old"][row, t] - given["ref"][row, t]).item() for t in range(length)]
        exact = [given["exact"][row, t].item() for t in range(length)]
        if config.kl.place == "loss":
            k1 = exact = [0.0] * length
        penalty.append([-kl_coef * k for k in (exact if config.kl.estimator == "exact" else k1)])
        own.append(
            [-kl_coef * (k - e) if config.kl.estimator == "exact" else 0.0 for k, e in zip(k1, exact, strict=True)]
        )
    scores = [
        shaped_score(score, length, limit, config.shaping)
        for score, length in zip(given["scores"].tolist(), lengths, strict=True)
    ]
    totals = [score + sum(row) for score, row in zip(scores, penalty, strict=True)]
    found = []
    for row, length in enumerate(lengths):
        if config.advantage == "reinforce":
            rewards = [p + (scores[row] if t == length - 1 else 0.0) for t, p in enumerate(penalty[row])]
            values = [value - baseline for value in returns_to_go(rewards, config.gamma)]
            found.append([value + more for value, more in zip(values, own[row], strict=True)])
        elif config.advantage == "remax":
            found.append([totals[row] - greedy[row].item() + more for more in own[row]])
        elif config.advantage == "gdpo":
            columns = zip(given["by_source"].unbind(1), given["weights"].tolist(), strict=True)
            value = sum(w * of_group("grpo", column.tolist(), group_ids, row, config.eps)[0] for column, w in columns)
            found.append([value] * length)
        else:
            value, weight = of_group(config.advantage, totals, group_ids, row, config.eps)
            found.append([value + weight * more for more in own[row]])
    if config.whiten_advantages:
        every = [value for row in found for value in row]
        middle = mean(every)
        deviation = math.sqrt(mean([(value - middle) ** 2 for value in every]) + 1e-8)
        found = [[(value - middle) / deviation for value in row] for row in found]
    return found


def importance_weight(differences, t, config):
    ratio = math.exp(differences[t] if config.level == "token" else sum(differences))
    if config.mode == "truncate":
        return min(ratio, config.high)
    return ratio if config.low <= ratio <= config.high else 0.0


def loss(new, entropy, given, config, *, kl, weights):
    """The loss, from (B, R) tensors `new` and `entropy` with a gradient; everything else is numbers."""
    total, lengths = 0.0, lengths_of(given["mask"])
    for row, length in enumerate(lengths):
        differences = [new[row, t] - given["old"][row, t].item() for t in range(length)]
        of_row = 0.0
        for t in range(length):
            log_ratio = differences[t]
            if config.ratio != "token":
                log_ratio = sum(differences) / (length if config.ratio == "sequence_mean" else 1)
            advantage = given["token_advantages"][row, t].item()
            value = surrogate(log_ratio.exp(), advantage, new[row, t], config) * weights[row][t]
            if kl.place == "loss":
                x = new[row, t] - given["ref"][row, t].item()
                value = value + kl.coef * (x**2 / 2 if kl.estimator == "k2" else (-x).exp() - 1 + x)
            of_row = of_row + value - config.entropy_coef * entropy[row, t]
        if config.normalization == "sequence":
            of_row = of_row / length
        elif config.normalization == "constant":
            of_row = of_row / given["mask"].shape[1]
        total = total + of_row
    return total / (sum(lengths) if config.normalization == "token" else len(lengths))


def surrogate(ratio, advantage, logprob, config):
    low, high = 1 - config.clip_range, 1 + config.high
    limited = ratio if low <= ratio <= high else ratio.detach() * 0 + (low if ratio < low else high)
    if config.surrogate == "none":
        return -advantage * ratio
    if config.surrogate == "cispo":
        return -advantage * limited.detach() * logprob
    found = -advantage * ratio if -advantage * ratio >= -advantage * limited else -advantage * limited
    if config.dual_clip is not None and advantage < 0 and found > -advantage * config.dual_clip:
        return ratio.detach() * 0 - advantage * config.dual_clip
    return found
