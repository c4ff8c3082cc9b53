"""The cost of a loop transition: forward and backward of a loop, relative to the vanilla loop around the same blocks.

python benchmarks/transition.py [--quick] [--width 256] [--compile]
"""

import argparse

import torch
from timing import medians

from looptim.config import ModelConfig
from looptim.model import LoopedLM

PRESETS = (
    "vanilla",
    "huginn",
    "parcae",
    "hyperloop",
    "operloop",
    "operloop_nesterov",
    "operloop_muon",
    "operloop_bounded",
)


def model(preset: str, width: int) -> LoopedLM:
    return LoopedLM(
        ModelConfig(
            layout="0-4x3-0",
            width=width,
            vocab_size=256,
            max_length=512,
            heads=width // 32,
            kv_heads=2,
            head_dim=32,
            window=128,
            sliding_rotary=32,
            full_rotary=16,
            dense_layers=4,
            dense_hidden=4 * width,
            loop={"preset": preset},
        ),
        seed=0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument("--quick", action="store_true", help="three repeats")
    arguments = parser.parse_args()
    models = {preset: model(preset, arguments.width) for preset in PRESETS}
    if arguments.compile:
        for m in models.values():
            m.compile_blocks()
    h = torch.randn(4, arguments.tokens, arguments.width, requires_grad=True)

    def training_call(m: LoopedLM):
        return lambda: m.hidden(h)[0].sum().backward()

    calls = {preset: training_call(m) for preset, m in models.items()}
    times = medians(calls, 3 if arguments.quick else arguments.repeats, "cpu")
    threads = torch.get_num_threads()
    print(f"width {arguments.width}, 4 x {arguments.tokens} tokens, 4 blocks looped 3 times, {threads} threads")
    print("| transition | time over the vanilla loop |\n|---|---|")
    for preset in PRESETS:
        print(f"| {preset} | {times[preset] / times['vanilla']:.3f} |")


if __name__ == "__main__":
    main()
