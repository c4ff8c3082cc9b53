"""What only runs on a GPU, with fake tensors that are on one: whole updates, by every branch that asks for CUDA.

Torch without CUDA cannot even pretend to have a device: autograd asks for its streams, and a device's guard is missing.
A few lines of C++ register a guard that does nothing, in a process of its own.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a compiler"),
]

GUARD = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};
using at::CUDAHooksArgs;
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device device() const noexcept { return c10::Device(c10::DeviceType::CUDA, 0); }
  c10::Stream stream() const noexcept { return c10::Stream(c10::Stream::DEFAULT, device()); }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
static Guard guard;
static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
"""

# Trains on a fake GPU; says which functions ran that only GPUs need, and how often.
TRAINS = """
import ctypes, json, sys
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
import torch
import torch.nn.functional as F
from collections import Counter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as flex
from torch.utils._python_dispatch import TorchDispatchMode
from looptim.base.numerics import polar_express
from looptim.config import Config
from looptim.data import Batch
from looptim.loop import kernels
from looptim.model import attention, grouped
from looptim.training import mesh
from looptim.training.distributed import World
from looptim.training.optim import MuonAdamW, parameter_groups
from looptim.training.step import TrainingState, update

ran = Counter()
def counted(module, name):
    before = getattr(module, name)
    def call(*arguments, **options):
        ran[name] += 1
        return before(*arguments, **options)
    setattr(module, name, call)
for name in ("flex_masked_attention", "attention_by_document", "blocked_window_attention"):
    counted(attention, name)
cut = kernels.chunks
def whole(flat):
    parts = list(cut(flat))
    ran["chunks"] += 1
    ran["cut"] += len(parts) > 1
    return parts
kernels.chunks, kernels.CHUNK_NUMEL = whole, 64
attention.HAS_TRITON = True
# Fake tensors have no memory to pin, and autocast asks the real device.
torch.Tensor.pin_memory = lambda tensor: tensor
torch.cuda.amp.common.amp_definitely_not_available = lambda: False
torch.cuda.is_bf16_supported = lambda *arguments, **options: True
# Inductor would generate code for the GPU: masks are made without it, and causal attention stands for the kernels.
make_mask = flex.create_block_mask
flex.create_block_mask = lambda *arguments, _compile=False, **options: make_mask(*arguments, **options)
def attend(q, k, v, *, block_mask, enable_gqa):
    assert q.is_cuda and block_mask.kv_num_blocks.is_cuda and enable_gqa
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
attention.compiled_flex_attention = lambda: attend

def move(module, device):
    for part in module.modules():
        for name, tensor in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
            moved = tensor.detach().to(device)
            held = part._parameters if name in part._parameters else part._buffers
            held[name] = torch.nn.Parameter(moved) if name in part._parameters else moved
mesh._move = move

class Zeros:
    def batch(self, split, *, seed, step, batch_size, rows):
        return Batch(*[torch.zeros(batch_size, 64, dtype=torch.long)] * 3)

class Reads(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "mm":
            ran[f"mm {args[0].dtype}"] += 1
        ran["reads"] += name in ("_local_scalar_dense", "nonzero", "masked_select", "unique2", "equal")
        return func(*args, **(kwargs or {}))

said = {}
for name, text in json.loads(sys.stdin.read()).items():
    capability = (9, 0) if "bf16" in name else (8, 0)
    torch.cuda.get_device_capability = lambda device=None, it=capability: it
    ran.clear()
    config = Config.model_validate(text)
    with FakeTensorMode(allow_non_fake_inputs=True):
        world = World(0, 1, torch.device("cuda", 0))
        model = mesh.build(config, world, None)
        optimizer = MuonAdamW(parameter_groups(model, lr=1e-3))
        run = TrainingState(config, None, world, Zeros(), model, optimizer)
        with Reads():
            done = update(run, 0)
        assert done.loss.device.type == "cuda" and {p.device.type for p in model.parameters()} == {"cuda"}
        # Under fake tensors an operator of ours is its shapes; these are its two ways.
        x, weight, ends = torch.empty(300, 16), torch.empty(4, 32, 16), torch.empty(4, dtype=torch.int32)
        x, weight, ends = (t.to("cuda") for t in (x, weight, ends))
        with Reads():
            assert grouped.waits_for_ends(x) and grouped.waits_for_ends(x.bfloat16()) == (capability < (9, 0))
            y = grouped.blocked_linear(x, weight, ends)
            assert grouped.blocked_outer(y, x, ends).shape == weight.shape
            assert F.grouped_mm(x.bfloat16(), weight.bfloat16().mT, offs=ends).shape == y.shape
            assert polar_express(weight.bfloat16()).dtype == torch.bfloat16
    said[name] = ran.copy()
print(json.dumps(said))
"""


def test_updates_on_a_fake_gpu_take_its_ways_and_read_nothing(tmp_path):
    from support import config

    window = {"pattern": "S", "window": 16, "max_length": 64, "heads": 2, "kv_heads": 1, "head_dim": 16}
    recipes = {
        "fp32": config(model=window, seq_len=64),
        "bf16": config(model=window, seq_len=64, dtype="bf16"),
        "documents": config(seq_len=64, model=window, data={"mask_boundaries": True, "mask_attention": True}),
    }
    (tmp_path / "guard.cpp").write_text(GUARD)
    (tmp_path / "trains.py").write_text(TRAINS)
    torch_folder = Path(torch.__file__).parent
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
    flags += ["-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_folder / 'lib'}", "-o", str(tmp_path / "guard.so")]
    subprocess.run(["c++", str(tmp_path / "guard.cpp"), *flags], check=True, timeout=300)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "trains.py"), str(tmp_path / "guard.so")],
        input=json.dumps({name: recipe.model_dump(mode="json") for name, recipe in recipes.items()}),
        capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ran = json.loads(done.stdout)
    for name, counts in ran.items():
        assert counts["flex_masked_attention"] and counts["chunks"], name
        for never in ("attention_by_document", "blocked_window_attention", "cut", "reads"):
            assert not counts.get(never), (name, never)
        assert (counts.get("mm torch.bfloat16", 0) > 0) == (name == "bf16")
