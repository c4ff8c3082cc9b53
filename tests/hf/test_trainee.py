"""`looptim train` on a pretrained decoder."""

import json

import pytest
import torch
import transformers
from peft.tuners.lora import LoraLayer
from support import REPO, run
from transformers import AutoModelForCausalLM, AutoTokenizer

import looptim as lo
from looptim.data import Tokenizer
from looptim.hf.maker import DECODER, complete, role
from looptim.hf.trainee import build_trainee
from looptim.rundir import RunDir, read_record
from looptim.training import distributed

pytestmark = pytest.mark.long

SIZES = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
RECIPE = """
[model]
layout = "1-2x3-1"
[loop]
preset = "operloop"
options = {{shared = true}}
[pretrained]
folder = "{folder}"
[data]
source = "{text}"
[optim]
lr = 1e-2
warmup = 1
[train]
steps = 4
seq_len = 24
batch_size = 4
log_every = 1
valid_every = 4
valid_batches = 1
checkpoint_every = 2
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe that trains a small random Llama, looped, on the readme."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(initializer_range=0.2, bos_token_id=256, eos_token_id=256, **SIZES)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    Tokenizer.bytes().save(folder)
    file = folder / "recipe.toml"
    file.write_text(RECIPE.format(folder=folder, text=REPO / "README.md"))
    return file


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def base_of(config):
    return AutoModelForCausalLM.from_pretrained(config.pretrained.folder)


def test_the_recipe_describes_the_decoder(recipe):
    config = lo.load_config(recipe)
    model = config.model
    assert (model.width, model.vocab_size, model.max_length, model.kv_heads, model.dense_layers) == (32, 257, 128, 2, 4)
    assert config.data.tokenizer == config.pretrained.folder
    counted = lo.count(complete(config)).parameters
    own = sum(weight.numel() for weight in build_trainee(config).parameters())
    # Ours has norms of queries and keys, of 8 numbers each.
    assert sum(counted.values()) == own + 4 * 2 * 8


@pytest.mark.parametrize("weights", ["transition", "lora", "all"])
def test_a_run_exports_what_it_has_trained(weights, recipe, tmp_path):
    options = [f"pretrained.weights={weights}", "pretrained.distill=0.25"]
    config = lo.load_config(recipe, set=options)
    lo.train(config, tmp_path / "whole", progress=False)
    folder = lo.export(tmp_path / "whole")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == "LoopedLlamaForCausalLM" and len(tokenizer) == 257
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == 256
    assert tokenizer.model_max_length == 128
    assert not any(isinstance(part, LoraLayer) for part in model.modules())
    base = base_of(config)
    moved = [name for name, weight in base.state_dict().items() if not torch.equal(weight, model.state_dict()[name])]
    assert bool(moved) == (weights != "transition")
    card = (folder / "README.md").read_text()
    assert "Validation loss" in card and "a pretrained decoder of which looptim has trained" in card
    assert "nothing was trained" not in card
    with pytest.raises(ValueError, match="has trained a decoder of transformers; `looptim export` it"):
        lo.load(tmp_path / "whole")


def test_what_was_killed_resumes_bit_for_bit(recipe, tmp_path):
    config = lo.load_config(recipe, set=["pretrained.weights=lora", "train.loops.warmup=3"])
    lo.train(config, tmp_path / "whole", progress=False)
    lo.train(config, tmp_path / "cut", progress=False)
    run_dir = RunDir(tmp_path / "cut")
    for file in run_dir.checkpoint(4).iterdir():
        file.unlink()
    run_dir.checkpoint(4).rmdir()
    lo.train(config, tmp_path / "cut", resume=True, progress=False)
    assert losses(tmp_path / "whole") == losses(tmp_path / "cut")
    # Of the base there is nothing in a checkpoint but the hash of its weights.
    assert read_record(run_dir.latest())["base"] == DECODER.origin(config)["base"]


def test_another_base_is_refused(recipe, tmp_path):
    config = lo.load_config(recipe, set=["pretrained.weights=transition"])
    lo.train(config, tmp_path / "run", progress=False)
    other = tmp_path / "other"
    base = base_of(config)
    with torch.no_grad():
        base.model.norm.weight += 1
    base.save_pretrained(other)
    Tokenizer.bytes().save(other)
    moved = lo.load_config(recipe, set=["pretrained.weights=transition", f"pretrained.folder={other}", "train.steps=6"])
    with pytest.raises(ValueError, match=r"are not those that .* began with; bring them back"):
        lo.train(moved, tmp_path / "run", resume=True, force=True, progress=False)


def test_the_loss_is_that_of_the_decoder_and_documents_are_kept_apart(recipe):
    config = lo.load_config(recipe, set=["pretrained.weights=transition"])
    model = build_trainee(config).eval()
    tokens = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))
    targets = torch.roll(tokens, -1, 1)
    targets[:, -1] = -100
    expected = model.decoder(tokens, labels=tokens).loss
    torch.testing.assert_close(model.loss(tokens, targets).cross_entropy, expected)
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
    alone = torch.tensor([[-100] * 5 + [1] * 7, [-100] * 12])
    packed = model.loss(tokens, torch.where(alone == 1, targets, -100), documents=documents).cross_entropy
    torch.testing.assert_close(packed, model.loss(tokens[:1, 5:], targets[:1, 5:]).cross_entropy)


def test_distillation_is_the_distance_from_the_base(recipe):
    config = lo.load_config(recipe, set=["pretrained.distill=1.0", "pretrained.temperature=2.0"])
    model, base = build_trainee(config), base_of(config)
    tokens = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))
    ours, theirs = ((m(tokens).logits / 2).log_softmax(-1) for m in (model.decoder, base))
    expected = 4 * (theirs.exp() * (theirs - ours)).sum(-1).mean()
    torch.testing.assert_close(model.loss(tokens, tokens).loss, expected)
    assert not any("teacher" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("scheme", ["fixed", "parcae", "huginn"])
def test_a_curriculum_grows_the_loops(scheme, recipe, tmp_path):
    options = [f"train.loops.scheme={scheme}", "train.loops.mean=4", "train.loops.warmup=4", "loop.preset=huginn"]
    config = lo.load_config(recipe, set=[*options, 'loop.options.start="prelude"', "train.loops.grad_loops=1"])
    from looptim.training.step import sample_loops

    depths = [sample_loops(config, step, slice(0, 4)) for step in range(4)]
    if scheme == "fixed":
        assert [depth and depth.steps for depth in depths] == [1, 2, 3, None]
    lo.train(config, tmp_path, progress=False)
    assert len(losses(tmp_path)) == 4


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Glm4Moe", "GptOss", "Phi3"])
def test_muon_finds_the_matrices_of_foreign_layers(kind):
    experts = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
    more = {
        "Qwen3Moe": {"num_experts": 4, **experts},
        "Glm4Moe": {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, **experts},
        "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "Phi3": {"pad_token_id": 0},
    }[kind]
    base = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SIZES | more))

    class Subject(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder = self.looped = lo.loop_model(base, "1-2x2-1", "operloop")

    groups = {}
    for name, weight in Subject().named_parameters():
        if name.startswith("decoder."):
            groups.setdefault(role(Subject(), name, weight), set()).add(".".join(name.split(".")[-2:]))
    assert groups["embedding"] == {"embed_tokens.weight"} and groups["head"] == {"lm_head.weight"}
    assert "o_proj.weight" in groups["matrices"] and "input_layernorm.weight" in groups["vectors"]
    assert not any("gate.weight" in name or "router" in name for name in groups["matrices"])
    if kind != "Phi3":
        assert groups["router"] in ({"gate.weight"}, {"router.weight"})
        assert {"experts.gate_up_proj", "experts.down_proj"} == groups["experts"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["loop.preset=vanilla", "pretrained.weights=transition"],
            "leaves nothing to train: vanilla has no parameters",
        ),
        (["model.layout=4", "loop.preset=none", "pretrained.weights=transition"], "needs a loop; choose lora or all"),
        (["model.width=16"], "model.width is 16, but the decoder in the folder has 32"),
        (["train.compile=true"], "train.compile is not there for a decoder of transformers"),
        (["pretrained.targets=['q']", "pretrained.weights=lora"], "has 'q', but the linear layers are down_proj"),
        (["train.loops.warmup=3", "loop.options.shared=false"], "needs a transition shared over loops"),
        (["pretrained.folder=nowhere"], "'nowhere' has no config.json"),
    ],
)
def test_bad_recipes_are_a_sentence(options, message, recipe, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        lo.train(lo.load_config(recipe, set=options), tmp_path / "run", progress=False)
    assert "\n" not in str(error.value)


def test_a_looped_folder_is_trained_as_it_is_looped(recipe, tmp_path):
    config = lo.load_config(recipe)
    looped = tmp_path / "looped"
    done = run("loop", config.pretrained.folder, "--layout", "1-2x3-1", "--out", str(looped))
    assert done.returncode == 0, done.stderr
    text = recipe.read_text().replace(config.pretrained.folder, str(looped))
    text = text[: text.index("[model]")] + text[text.index("[pretrained]") :]
    (tmp_path / "recipe.toml").write_text(text)
    trained = lo.load_config(tmp_path / "recipe.toml", set=["train.steps=2"])
    assert trained.model.layout == "1-2x3-1" and trained.model.loop.preset == "operloop"
    out = tmp_path / "run"
    done = run("train", str(tmp_path / "recipe.toml"), "--out", str(out), "--set", "train.steps=2")
    assert done.returncode == 0, done.stderr
    assert type(AutoModelForCausalLM.from_pretrained(out / "model")).__name__ == "LoopedLlamaForCausalLM"
    with pytest.raises(ValueError, match="is looped already, as 1-2x3-1 by operloop; leave"):
        build_trainee(lo.load_config(tmp_path / "recipe.toml", set=["model.layout=1-2x2-1"]))


def test_the_base_alone_can_be_trained_for_comparison(recipe, tmp_path):
    config = lo.load_config(recipe, set=["model.layout=4", "loop.preset=none", "pretrained.weights=lora"])
    lo.train(config, tmp_path / "run", progress=False)
    assert type(AutoModelForCausalLM.from_pretrained(lo.export(tmp_path / "run"))).__name__ == "LlamaForCausalLM"


def test_the_trainer_describes_what_it_trains(recipe):
    config = lo.load_config(recipe, set=["pretrained.weights=transition"])
    model = DECODER.build(config, distributed.World(0, 1, torch.device("cpu")), None)
    assert DECODER.describe(config, model).startswith("LoopedLlamaForCausalLM 1-2x3-1 operloop, ")
