"""The smallest model that has every part: sliding and full attention, dense and routed blocks, a loop."""

TINY = {
    "layout": "1-1x2-1",
    "width": 32,
    "vocab_size": 257,
    "max_length": 32,
    "tied": True,
    "pattern": "SF",
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 16,
    "window": 8,
    "sliding_rotary": 16,
    "full_rotary": 8,
    "dense_layers": 1,
    "dense_hidden": 64,
    "experts": 4,
    "top_k": 2,
    "expert_hidden": 16,
    "shared_hidden": 16,
    "init_std": 0.05,
    "loop": {"preset": "operloop"},
}
