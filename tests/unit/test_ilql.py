"""ILQL's loss against plain loops in float64, on tables whose values are known, and the files that it reads."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from megarlhf import kernels
from megarlhf.algorithms.ilql import ILQLConfig, ilql, ilql_loss
from megarlhf.batch import Rewarded
from megarlhf.config import UserError
from megarlhf.data.rewarded import RewardedDataConfig, RewardedLoader, load_rewarded
from tests.unit.test_preferences import tokenizer, write  # noqa: F401

# ------------------------------------------------------------------------------------------------ the loss

HIDDEN, VOCABULARY = 6, 11
SPANS = [(0, 7), (2, 5), (0, 1), (3, 3), (1, 7)]  # each row's counted columns; the fourth has none
NAMES = ("policy", "q1", "q2", "slow1", "slow2", "value")


def given():
    """(B, R, H) states, weights by name, and rows with a reward on some tokens."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = len(SPANS), 7

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.stack([(torch.arange(columns) >= first) & (torch.arange(columns) < end) for first, end in SPANS])
    tokens = torch.randint(VOCABULARY, (rows, columns + 1), generator=generator)
    weights = {name: normal(1 if name == "value" else VOCABULARY, HIDDEN) for name in NAMES}
    rewards = torch.where(mask, normal(rows, columns), 0)
    return normal(rows, columns, HIDDEN), weights, Rewarded(tokens, mask, rewards=rewards)


def outputs_of(states, weights, rows):
    """As the heads make them."""
    labels, flat = rows.tokens[:, 1:], states.flatten(0, 1)
    found = {name: kernels.linear_logprobs(states, weights[name], labels) for name in ("policy", "q1", "q2")}
    slow = [kernels.label_logits(flat, weights[name], labels.flatten()).view(labels.shape) for name in NAMES[3:5]]
    return {
        "logprobs": found["policy"].logprobs,
        "values": states @ weights["value"][0],
        "slow_q": torch.minimum(*slow),
        **{name: found[name].logits for name in ("q1", "q2")},
        **{f"{name}_logprobs": found[name].logprobs for name in ("q1", "q2")},
    }


def loop(states, weights, rows, config):
    """The loss, token by token."""
    total = torch.zeros((), dtype=torch.float64)
    for row, (first, end) in enumerate(SPANS):
        for j in range(first, end):
            token, state = int(rows.tokens[row, j + 1]), states[row, j]
            logits = {name: [weight @ state for weight in weights[name]] for name in NAMES}
            value = logits["value"][0]
            following = (weights["value"][0] @ states[row, j + 1]).detach() if j + 1 < end else 0.0
            target = rows.rewards[row, j] + config.gamma * following
            slow = min(logits["slow1"][token], logits["slow2"][token]).detach()
            for name in ("q1", "q2"):
                total = total + (logits[name][token] - target) ** 2
                log_sum = sum(logit.exp() for logit in logits[name]).log()
                total = total - config.cql_coef * (logits[name][token] - log_sum)
            share = config.tau if slow > value else 1 - config.tau
            total = total + share * (slow - value) ** 2
            weight = (config.awac_beta * (slow - value)).exp().detach()
            log_sum = sum(logit.exp() for logit in logits["policy"]).log()
            total = total - config.awac_coef * weight * (logits["policy"][token] - log_sum)
    return total


@pytest.mark.parametrize("config", [
    ILQLConfig(),
    ILQLConfig(tau=0.9, gamma=0.8, cql_coef=0.3, awac_coef=0.7, awac_beta=0.5),
], ids=["default", "all"])  # fmt: skip
def test_the_loss_and_its_gradient_are_those_of_a_loop(config):
    states, weights, rows = given()
    leaves = [states, *weights.values()]
    for leaf in leaves:
        leaf.requires_grad_()
    total, count, metrics = ilql_loss(outputs_of(states, weights, rows), rows, config=config)
    expected = loop(states, weights, rows, config)
    assert count == sum(end - first for first, end in SPANS)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    parts = sum(metrics[f"loss/{name}"][0] for name in ("q", "v", "cql", "awac"))
    torch.testing.assert_close(parts, total)
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    wanted = torch.autograd.grad(expected, leaves, allow_unused=True)
    for name, ours, theirs in zip(("states", *NAMES), found, wanted, strict=True):
        if name.startswith("slow"):
            assert ours is None and theirs is None
            continue
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        assert theirs.abs().max() > 0.1
    assert not found[0][~rows.mask].any()


def test_the_metrics_are_means_over_counted_tokens():
    """Each of docs/metrics.md, token by token."""
    config = ILQLConfig(tau=0.9, gamma=0.8, cql_coef=0.3, awac_coef=0.7, awac_beta=0.5)
    states, weights, rows = given()
    outputs = {name: value.double() for name, value in outputs_of(states, weights, rows).items()}
    _, _, metrics = ilql_loss(outputs, rows, config=config)
    found = {name: (total / count).item() for name, (total, count) in metrics.items()}
    per_token = []
    for row, (first, end) in enumerate(SPANS):
        for j in range(first, end):
            one = {name: value[row, j].item() for name, value in outputs.items()}
            following = outputs["values"][row, j + 1].item() if j + 1 < end else 0.0
            target = rows.rewards[row, j].item() + 0.8 * following
            lead = one["slow_q"] - one["values"]
            q = (one["q1"] - target) ** 2 + (one["q2"] - target) ** 2
            v = abs(0.9 - (lead < 0)) * lead**2
            cql = -0.3 * (one["q1_logprobs"] + one["q2_logprobs"])
            awac = -0.7 * math.exp(0.5 * lead) * one["logprobs"]
            per_token.append({
                "loss": q + v + cql + awac, "loss/q": q, "loss/v": v, "loss/cql": cql, "loss/awac": awac,
                "mean/value": one["values"], "mean/q": one["slow_q"], "mean/advantage": lead,
                "mean/logprob": one["logprobs"],
            })  # fmt: skip
    assert found.keys() == per_token[0].keys()
    for name, value in found.items():
        assert value == pytest.approx(sum(token[name] for token in per_token) / len(per_token), rel=1e-7), name


def test_what_does_not_count_changes_nothing():
    states, weights, rows = given()
    outputs = outputs_of(states, weights, rows)
    total, _, _ = ilql_loss(outputs, rows, config=ILQLConfig())
    spoilt = {name: value.masked_fill(~rows.mask, torch.nan) for name, value in outputs.items()}
    assert torch.equal(ilql_loss(spoilt, rows, config=ILQLConfig())[0], total)
    changed = dataclasses.replace(rows, rewards=rows.rewards.masked_fill(~rows.mask, torch.nan))
    assert torch.equal(ilql_loss(outputs, changed, config=ILQLConfig())[0], total)


@pytest.mark.parametrize(
    ("key", "value"),
    [("tau", 1.0), ("tau", 0.0), ("gamma", 1.1), ("cql_coef", -1.0), ("awac_beta", -0.1), ("target_alpha", 0.0),
     ("target_period", 0)],
)  # fmt: skip
def test_settings_that_make_no_sense(key, value):
    with pytest.raises(ValueError, match=f"^{key}: must "):
        ILQLConfig(**{key: value})


# ------------------------------------------------------------------------------------------------ known values

STATES, ACTIONS, END = 6, 3, 6  # an action leads to a later state or to the end
GAMMA = 0.9


def world():
    """(next state, reward) of each state and action, and responses of a policy that prefers low rewards."""
    generator = torch.Generator().manual_seed(3)
    after = torch.tensor([[int(torch.randint(s + 1, END + 1, (), generator=generator)) for _ in range(ACTIONS)]
                          for s in range(STATES)])  # fmt: skip
    after[:, 0] = torch.arange(1, STATES + 1)  # every state is reached
    rewards = torch.randn(STATES, ACTIONS, generator=generator, dtype=torch.float64)
    policy = (-rewards).softmax(1)
    paths = []
    for _ in range(200):
        state, path = 0, []
        while state != END:
            action = int(torch.multinomial(policy[state], 1, generator=generator))
            path.append((state, action))
            state = int(after[state, action])
        paths.append(path)
    return after, rewards, paths


class Tables(nn.Module):
    """Q and V as tables, with the interface of an engine for an algorithm."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.q = nn.Parameter(0.1 * torch.randn(2, STATES, ACTIONS, generator=generator, dtype=torch.float64))
        self.v = nn.Parameter(torch.zeros(STATES, dtype=torch.float64))
        self.slow, self.steps = self.q.detach().clone(), 0

    def update_slow_copies(self, rate):
        self.slow.lerp_(self.q.detach(), rate)

    def outputs(self, states, actions):
        taken = [table[states, actions] for table in self.q]
        logs = [table.log_softmax(1)[states, actions] for table in self.q]
        return {
            "q1": taken[0], "q2": taken[1], "q1_logprobs": logs[0], "q2_logprobs": logs[1], "values": self.v[states],
            "slow_q": self.slow[:, states, actions].amin(0), "logprobs": torch.zeros_like(taken[0]),
        }  # fmt: skip


def learned(tau):
    """The tables after training on the paths: mean Q, V."""
    _, rewards, paths = world()
    columns = max(map(len, paths))
    states, actions = torch.zeros(2, len(paths), columns, dtype=torch.int64)
    for row, path in enumerate(paths):
        states[row, : len(path)], actions[row, : len(path)] = torch.tensor(path).T
    mask = torch.arange(columns) < torch.tensor([len(path) for path in paths])[:, None]
    tokens = torch.nn.functional.pad(actions, (1, 0))
    rows = Rewarded(tokens, mask, rewards=rewards[states, actions] * mask)
    tables, total = Tables(), 3000
    algorithm = ilql(ILQLConfig(tau=tau, gamma=GAMMA, cql_coef=0, awac_coef=0, target_alpha=0.2, target_period=2))
    optimizer = torch.optim.Adam(tables.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 1e-3, total)
    for _ in range(total):
        loss, count, _ = algorithm.loss(tables.outputs(states, actions), rows)
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
        schedule.step()
        tables.steps += 1
        algorithm.after_update(tables)
    return tables.q.detach(), tables.v.detach()


def solved(backup):
    """Q and V by backward induction, V(s) = backup(s, Q(s))."""
    after, rewards, _ = world()
    q, v = torch.zeros(STATES, ACTIONS, dtype=torch.float64), torch.zeros(STATES + 1, dtype=torch.float64)
    for state in reversed(range(STATES)):
        q[state] = rewards[state] + GAMMA * v[after[state]]
        v[state] = backup(state, q[state])
    return q, v[:STATES]


def frequencies():
    """(STATES, ACTIONS): how often the data takes each action in each state."""
    counts = torch.zeros(STATES, ACTIONS, dtype=torch.float64)
    for path in world()[2]:
        for state, action in path:
            counts[state, action] += 1
    assert counts.min() > 0
    return counts / counts.sum(1, keepdim=True)


def test_at_one_half_the_values_are_those_of_the_datas_policy():
    """The mean over the data's actions: what SARSA reaches. Within 1e-3."""
    policy = frequencies()
    expected_q, expected_v = solved(lambda state, q: policy[state] @ q)
    q, v = learned(0.5)
    torch.testing.assert_close(v, expected_v, rtol=0, atol=1e-3)
    torch.testing.assert_close(q, expected_q.expand(2, -1, -1), rtol=0, atol=1e-3)


def test_towards_one_the_values_are_the_optimal_ones():
    """The maximum over the data's actions: value iteration. Within 0.01 at tau 0.9999, by which the optimum differs
    from the data's policy in every state but the last."""
    expected_q, expected_v = solved(lambda state, q: q.max())
    q, v = learned(0.9999)
    torch.testing.assert_close(v, expected_v, rtol=0, atol=0.01)
    torch.testing.assert_close(q, expected_q.expand(2, -1, -1), rtol=0, atol=0.01)
    behaviour = solved(lambda state, q: frequencies()[state] @ q)[1]
    assert (expected_v - behaviour).min() > 0.1
    assert torch.equal(q.amin(0).argmax(1), expected_q.argmax(1))


# ------------------------------------------------------------------------------------------------ the data


def load(path, tokenizer, **options):  # noqa: F811
    return load_rewarded(path, tokenizer, RewardedDataConfig(train=path, **options))


ROWS = [
    {"prompt": "Two plus two is", "response": " four", "reward": 1},
    {"prompt": "The sea is", "response": " slow and slow and slow", "reward": -0.5, "id": 7},
    {"prompt": "", "response": " fox", "reward": 0.25},
]


def test_rows(tokenizer, tmp_path):  # noqa: F811
    data, report = load(write(tmp_path / "x.jsonl", [ROWS[0], "", *ROWS[1:]]), tokenizer)
    for index, row in enumerate(ROWS):
        tokens, mask, _ = data.row(index)
        before = [tokenizer.bos_id, *tokenizer.encode(row["prompt"])]
        assert tokens[: len(before)].tolist() == before and tokens[-1] == tokenizer.eos_id
        assert tokenizer.decode(tokens[len(before) : -1]).strip() == row["response"].strip()
        assert mask.tolist() == [False] * len(before) + [True] * (len(tokens) - len(before))
    assert data.rewards.tolist() == [1, -0.5, 0.25]
    assert f": 3 responses, {len(data.tokens)} tokens, rewards -0.5 to 1, mean 0.25" in report.summary()
    mean, std = data.moments
    scaled = data.normalized(mean, std)
    assert abs(scaled.rewards.mean()) < 1e-12 and scaled.rewards.std() == pytest.approx(1)


def test_options_and_rows_that_are_too_long(tokenizer, tmp_path):  # noqa: F811
    path = write(tmp_path / "x.jsonl", [{"q": "The", "a": " sea", "r": 2}, {"q": "The", "a": " sea" * 30, "r": 1}])
    keys = dict(prompt_key="q", response_key="a", reward_key="r")
    data, report = load(path, tokenizer, max_length=12, add_bos=False, add_eos=False, **keys)
    assert len(data) == 1 and tokenizer.decode(data.row(0)[0]) == "The sea" and report.dropped.first[0].endswith(":2")
    assert f"1 dropped (more than 12 tokens) ({path}:2)" in report.summary()
    with pytest.raises(UserError, match="0 responses, 0 tokens; 2 dropped.*no response is left: give a file"):
        load(path, tokenizer, max_length=2, **keys)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "The", "response": " sea"}, "no key 'reward' (found: prompt, response)"),
        ({"prompt": "The", "response": " sea", "reward": None}, "'reward' must be a number from -1e6 to 1e6, not None"),
        ({"prompt": "The", "response": " sea", "reward": "1"}, "'reward' must be a number from -1e6 to 1e6, not '1'"),
        ({"prompt": "The", "response": " sea", "reward": True}, "'reward' must be a number from -1e6 to 1e6, not True"),
        ('{"prompt": "The", "response": " sea", "reward": NaN}', "must be a number from -1e6 to 1e6, not nan"),
        ('{"prompt": "The", "response": " sea", "reward": -Infinity}', "must be a number from -1e6 to 1e6, not -inf"),
        ({"prompt": "The", "response": " sea", "reward": 10**400}, "must be a number from -1e6 to 1e6, not 1000"),
        ({"prompt": "The", "response": " sea", "reward": 1e7}, "must be a number from -1e6 to 1e6, not 10000000.0"),
        ({"prompt": "The", "response": "  ", "reward": 1}, "'response' is empty"),
        ({"prompt": "The", "response": 3, "reward": 1}, "'response' must be a string, not int"),
        ({"response": " sea", "reward": 1}, "no key 'prompt' (found: response, reward)"),
        ("[1]", "a line must be a JSON object, not list"),
    ],
)
def test_bad_lines(tokenizer, tmp_path, row, reason):  # noqa: F811
    path = write(tmp_path / "x.jsonl", [*ROWS, row])
    with pytest.raises(UserError) as caught:
        load(path, tokenizer)
    assert f"{path}:4: " in str(caught.value) and reason in str(caught.value) and "\n" not in str(caught.value)
    _, report = load(path, tokenizer, max_bad_fraction=0.5)
    assert "1 malformed and skipped" in report.summary()


@pytest.mark.parametrize("ranks", [1, 2])
def test_batches(tokenizer, tmp_path, ranks):  # noqa: F811
    """Every row's reward is on its last token, in training and in evaluation, whose last batch is padded."""
    rows = [{"prompt": "The", "response": " sea" * (1 + i * 7 % 5), "reward": i} for i in range(7)]
    data, _ = load(write(tmp_path / "x.jsonl", rows), tokenizer)
    seen = []
    for rank in range(ranks):
        loader = RewardedLoader(data, global_batch=4, dp_rank=rank, dp_size=ranks, pad_id=0)
        for batch in [loader.batch(0), *loader.epoch_batches()]:
            assert batch.rewards.shape == batch.mask.shape and batch.rewards.dtype == torch.float32
            ends = batch.mask.sum(1) + 1  # BOS, "The"
            for row in range(len(batch)):
                counted = batch.mask[row].nonzero().flatten()
                if len(counted):
                    reward = batch.rewards[row, counted[-1]].item()
                    assert batch.rewards[row].sum().item() == reward
                    assert len(data.row(int(reward))[0]) == batch.segments[row].sum() and ends[row] > 1
                    seen.append(reward)
                else:
                    assert not batch.rewards[row].any()
    assert sorted(set(seen)) == [0, 1, 2, 3, 4, 5, 6] and len(seen) == 11
