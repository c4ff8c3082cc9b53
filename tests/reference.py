"""A slow, obvious reference of the looped mixture-of-experts language model, for use as a test oracle.

Written from the paper (Algorithm 1 for both transitions, OperLoop in its residual-map form) and from the names of
the parameters alone, without a look at the implementation: nothing here may import from `looptim`. Everything is
float64, one sequence at a time, with plain loops over tokens, heads, experts and streams.

`config` is any object with the attributes read below; `state` maps parameter names to tensors.
"""

import math

import torch

CONTROLLER_EPS = 1e-20  # of the norm of the flattened streams; it has no gain


def reference_logits(config, state, tokens):
    """Logits (B, T, vocab) in float64 of the token ids (B, T)."""
    state = {name: tensor.detach().to(torch.float64) for name, tensor in state.items()}
    return torch.stack([_sequence(config, state, row) for row in tokens])


def parse_layout(layout):
    """Segments as (K, R), with R None where the segment is not looped.

    >>> parse_layout("4-4x3-2")
    [(4, None), (4, 3), (2, None)]
    """
    segments = []
    for part in layout.split("-"):
        if "x" in part:
            blocks, loops = part.split("x")
            segments.append((int(blocks), int(loops)))
        else:
            segments.append((int(part), None))
    return segments


def _sequence(config, state, tokens):
    """(T,) token ids to (T, vocab) logits."""
    h = torch.stack([state["embedding.weight"][int(token)] for token in tokens])  # (T, d)

    first = 0  # number of the segment's first distinct block
    looped = 0  # number of the looped segment
    for blocks, loops in parse_layout(config.layout):
        numbers = range(first, first + blocks)
        if loops is None:
            h = _stack(config, state, numbers, h, visit=0)
        else:
            h = _loop(config, state, looped, numbers, loops, h)
            looped += 1
        first += blocks

    h = _rmsnorm(h, state["norm.gain"], config.norm_eps)
    head = state["embedding.weight"] if config.tied else state["head.weight"]
    return h @ head.T


# The loop: Algorithm 1


def _loop(config, state, segment, numbers, loops, h):
    """Run the blocks `numbers` `loops` times over r streams of h (T, d)."""
    streams = config.loop.options.get("streams", 4)
    shared = config.loop.options.get("shared", False)
    length = h.shape[0]

    Y = [torch.stack([h[t]] * streams) for t in range(length)]  # one (r, d) a token
    eta = [1.0 for _ in range(length)]  # η_{-1}

    for l in range(loops):  # noqa: E741
        prefix = f"loops.{segment}.transitions.{0 if shared else l}."

        pre, post, res = [], [], []
        for t in range(length):
            Z = _controller_input(Y[t])
            if config.loop.preset == "hyperloop":
                H_pre = _gate(state, prefix + "projection.map.gate.", Z)
                H_post = 2 * _gate(state, prefix + "write.gate.", Z)
                H_res = torch.diag(_gate(state, prefix + "rule.decay.gate.", Z))
            elif config.loop.preset == "operloop":
                eta[t] = eta[t] * _gate(state, prefix + "rule.step.gate.", Z).item()
                H_in = _gate(state, prefix + "projection.map.gate.", Z)
                Lambda = torch.diag(_gate(state, prefix + "rule.decay.gate.", Z))
                identity = torch.eye(streams, dtype=torch.float64)
                H_pre = H_in
                H_post = eta[t] * H_in
                H_res = identity - eta[t] * (Lambda + torch.outer(H_in, H_in))
            else:
                raise ValueError(f"no reference for the transition {config.loop.preset!r}")
            assert H_pre.shape == H_post.shape == (streams,)
            assert H_res.shape == (streams, streams)
            pre.append(H_pre)
            post.append(H_post)
            res.append(H_res)

        o = torch.stack([pre[t] @ Y[t] for t in range(length)])  # (T, d)
        target = _stack(config, state, numbers, o, visit=l) + state[prefix + "target.bias"]
        Y = [res[t] @ Y[t] + torch.outer(post[t], target[t]) for t in range(length)]

    return torch.stack([Y[t].mean(dim=0) for t in range(length)])


def _controller_input(Y):
    """Z = flatten(Y) / rms, streams-major: all of stream 0, then all of stream 1, ..."""
    flat = torch.cat([Y[i] for i in range(Y.shape[0])])
    return flat / torch.sqrt((flat**2).mean() + CONTROLLER_EPS)


def _gate(state, prefix, Z):
    """σ(a · (W Z) + b), as a vector."""
    value = torch.sigmoid(state[prefix + "a"] * (state[prefix + "W"] @ Z) + state[prefix + "b"])
    return value.reshape(-1)


# The backbone


def _stack(config, state, numbers, h, visit):
    for number in numbers:
        h = _block(config, state, number, h, visit)
    return h


def _block(config, state, number, h, visit):
    prefix = f"blocks.{number}."
    kind = config.pattern[number % len(config.pattern)]

    normed = _rmsnorm(h, state[prefix + "attention_norm.gain"], config.norm_eps)
    h = h + _attention(config, state, prefix + "attention.", kind, normed)

    normed = _rmsnorm(h, state[prefix + "feedforward_norm.gain"], config.norm_eps)
    feedforward = _dense if number < config.dense_layers else _mixture
    return h + torch.stack([feedforward(config, state, prefix + "feedforward.", x, visit) for x in normed])


def _rmsnorm(x, gain, eps):
    return x / torch.sqrt((x**2).mean(dim=-1, keepdim=True) + eps) * (1 + gain)


def _attention(config, state, prefix, kind, x):
    """Causal grouped-query attention of x (T, d), over a window where kind is S, over everything where it is F."""
    if kind == "S":
        rotary, theta, window = config.sliding_rotary, config.sliding_theta, config.window
    elif kind == "F":
        rotary, theta, window = config.full_rotary, config.full_theta, None
    else:
        raise ValueError(f"no attention of kind {kind!r}")

    length, size = x.shape[0], config.head_dim
    # (T, heads, head_dim), the head the slower index of the projection's output
    q = (x @ state[prefix + "q.weight"].T).reshape(length, config.heads, size)
    k = (x @ state[prefix + "k.weight"].T).reshape(length, config.kv_heads, size)
    v = (x @ state[prefix + "v.weight"].T).reshape(length, config.kv_heads, size)
    if config.qk_norm:
        q = _rmsnorm(q, state[prefix + "q_norm.gain"], config.norm_eps)
        k = _rmsnorm(k, state[prefix + "k_norm.gain"], config.norm_eps)

    outputs = []
    for i in range(length):
        seen = range(i + 1) if window is None else range(max(0, i - window + 1), i + 1)
        heads = []
        for head in range(config.heads):
            group = head // (config.heads // config.kv_heads)
            query = _rotate(q[i, head], i, rotary, theta)
            scores = [query @ _rotate(k[j, group], j, rotary, theta) / math.sqrt(size) for j in seen]
            weights = torch.softmax(torch.stack(scores), dim=0)
            heads.append(sum(weight * v[j, group] for weight, j in zip(weights, seen, strict=True)))
        outputs.append(state[prefix + "o.weight"] @ torch.cat(heads))
    return torch.stack(outputs)


def _rotate(x, position, rotary, theta):
    """Turn the pairs (i, i + rotary/2) of the first `rotary` dimensions by position · θ^(−2i/rotary)."""
    half = rotary // 2
    turned = x.clone()
    for i in range(half):
        angle = position * float(theta) ** (-2 * i / rotary)
        turned[i] = math.cos(angle) * x[i] - math.sin(angle) * x[i + half]
        turned[i + half] = math.sin(angle) * x[i] + math.cos(angle) * x[i + half]
    return turned


def _swiglu(gate, up, down, x):
    g = gate @ x
    return down @ (g * torch.sigmoid(g) * (up @ x))


def _dense(config, state, prefix, x, visit):
    return _swiglu(state[prefix + "gate.weight"], state[prefix + "up.weight"], state[prefix + "down.weight"], x)


def _mixture(config, state, prefix, x, visit):
    """One token x (d) through its top-k experts and the shared one; the bias selects and does not weigh."""
    bias = state[prefix + "bias"]
    bias = bias[min(visit, bias.shape[0] - 1)]
    router = state[prefix + "router.weight"].reshape(-1, config.experts, len(x))
    scores = torch.sigmoid(router[min(visit, len(router) - 1)] @ x)
    ranked = sorted(range(config.experts), key=lambda e: float(scores[e] + bias[e]), reverse=True)
    chosen = ranked[: config.top_k]
    total = sum(scores[e] for e in chosen)

    y = torch.zeros_like(x)
    for e in chosen:
        gate, up, down = (state[prefix + f"experts.{name}"][e] for name in ("gate", "up", "down"))
        y = y + scores[e] / total * config.routed_scaling * _swiglu(gate, up, down, x)
    if config.shared_hidden:
        y = y + _dense(config, state, prefix + "shared.", x, visit)
    return y
