"""A small run, and benchmarks as a cache of the Hugging Face libraries, where there are any."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("LOOPTIM_BENCHMARKS", REPOSITORY.parent / "shared" / "data" / "lm-eval"))
FEW = ("EleutherAI/lambada_openai", "EleutherAI/wikitext_document_level", "allenai/ai2_arc", "openai/gsm8k")
CODE = ("openai/openai_humaneval",)


def prepare(folder, names=None):
    """The cache of the named data sets, or of all."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the benchmarks in {SHARED}; LOOPTIM_BENCHMARKS names another folder")
    tree = SHARED / "hub"
    if names is not None:
        tree = folder / "tree"
        index = json.loads((SHARED / "hub" / "INDEX.json").read_text())
        for name in names:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).symlink_to(SHARED / "hub" / name)
        (tree / "INDEX.json").write_text(json.dumps({name: index[name] for name in names}))
    script = str(SHARED / "prepare_cache.py")
    subprocess.run(
        [sys.executable, script, "--tree", str(tree), "--hf-home", str(folder / "home")],
        check=True,
        capture_output=True,
    )
    return folder / "home"


@pytest.fixture(scope="session")
def solutions():
    """The programs of a data set of code with their tests: those that solve a problem, and those that do not."""
    parquet = pytest.importorskip("pyarrow.parquet")

    def read(name):
        if not SHARED.is_dir():
            pytest.skip(f"needs the benchmarks in {SHARED}; LOOPTIM_BENCHMARKS names another folder")
        rows = parquet.read_table(next((SHARED / "hub" / name).rglob("*.parquet"))).to_pylist()
        tests = [f"{row['test']}\ncheck({row['entry_point']})" for row in rows]
        right = [row["prompt"] + row["canonical_solution"] for row in rows]
        return right, [row["prompt"] + "    return None\n" for row in rows], tests

    return read


@pytest.fixture(scope="session")
def few(tmp_path_factory):
    """A cache of a few data sets, which is quick to make."""
    return prepare(tmp_path_factory.mktemp("few"), (*FEW, *CODE))


@pytest.fixture(scope="session")
def everything(tmp_path_factory):
    """A cache of all data sets of the paper."""
    return prepare(tmp_path_factory.mktemp("everything"))


@pytest.fixture(scope="session")
def make_run():
    """Trains a toy for two steps and exports it."""
    return train


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A run of two steps, with the context of a toy."""
    return train(tmp_path_factory.mktemp("evaluated") / "run", max_length=512)


def train(folder, **model):
    import looptim as lo
    from looptim.config import Config, ModelConfig
    from looptim.hf.export import export

    config = Config(
        model=ModelConfig.tiny(init_std=0.2, loop={"preset": "operloop", "options": {"shared": True}}, **model),
        data={"source": "synthetic:addition", "options": {"digits": 3}},
        optim={"lr": 3e-3, "min_lr": 3e-4, "warmup": 1},
        train={"steps": 2, "seq_len": 32, "batch_size": 4, "checkpoint_every": 2, "valid_every": 2, "valid_batches": 1},
    )
    lo.train(config, folder)
    export(folder)
    return folder


def offline(home):
    """Offline, with the caches in `home`."""
    return os.environ | {
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_EVALUATE_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="session")
def python():
    """Runs a script in a process of its own, since the libraries read their variables once."""

    def call(home, script, *arguments):
        command = [sys.executable, "-c", script, *map(str, arguments)]
        return subprocess.run(command, env=offline(home), capture_output=True, text=True)

    return call


@pytest.fixture(scope="session")
def environment():
    """The variables of a process that finds its caches in a folder."""
    return offline
