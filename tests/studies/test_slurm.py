"""A study through SLURM: an sbatch on the PATH that runs what it is given leaves the files of a study without one."""

import os
import subprocess
import sys

import pytest
from support import config, losses, run

pytestmark = pytest.mark.long

# What SLURM does, as far as a study can tell: options in the script, an array's jobs one by one, an id for an answer.
SBATCH = """#!{python}
import os, re, subprocess, sys
from pathlib import Path
script = Path(sys.argv[-1])
options = re.findall("^#SBATCH (.*)$", script.read_text(), re.M)
number = sum(1 for _ in Path("{log}").open()) + 1 if Path("{log}").exists() else 1
with open("{log}", "a") as log:
    log.write(" ".join(options) + "\\n")
if "--time=0" in options:
    sys.exit("sbatch: error: invalid time")
array = next((re.match(r"--array=0-(\\d+)%", o) for o in options if o.startswith("--array")), None)
for task in range(int(array[1]) + 1) if array else [None]:
    variables = {{}} if task is None else {{"SLURM_ARRAY_TASK_ID": str(task)}}
    done = subprocess.run(["bash", str(script)], env={{**os.environ, **variables}}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
print(f"{{number}};cluster")
"""


@pytest.fixture
def study(tmp_path):
    small = config(model={"width": 16, "head_dim": 8, "sliding_rotary": 8, "full_rotary": 4}, steps=4, valid_every=4)
    (tmp_path / "recipe.toml").write_text(small.to_toml())
    lines = [
        'title = "Two"',
        'base = "recipe.toml"',
        "seeds = [0]",
        "tokens = 512",
        "matched = false",
        'reference = "vanilla"',
    ]
    lines += ["[variants.vanilla]", 'preset = "vanilla"', "[variants.operloop]", 'preset = "operloop"']
    (tmp_path / "study.toml").write_text("\n".join(lines))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text(SBATCH.format(python=sys.executable, log=tmp_path / "log"))
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    return tmp_path


def submits(folder, *extra):
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    arguments = ["study", str(folder / "study.toml"), "--out", str(folder / "out"), "--launcher", "slurm", *extra]
    return run(*arguments, env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}, timeout=200)


@pytest.mark.slow
def test_an_array_and_a_job_after_it_make_the_study(study):
    done = submits(study, "--sbatch=--partition=gpu", "--jobs", "3")
    assert done.returncode == 0, done.stderr
    assert "submitted 1, 2; the last writes" in done.stdout
    array, after = (study / "log").read_text().splitlines()
    assert "--array=0-1%3" in array and "--partition=gpu" in array and "--signal=B:TERM@120" in array
    assert "--dependency=afterany:1" in after
    assert (study / "out" / "index.html").is_file()
    alone = run("study", str(study / "study.toml"), "--out", str(study / "alone"), timeout=200)
    assert alone.returncode == 0, alone.stderr
    names = [sorted(path.name for path in (study / name / "runs").iterdir()) for name in ("out", "alone")]
    assert names[0] == names[1]
    for name in names[0]:
        assert losses(study / "out" / "runs" / name) == losses(study / "alone" / "runs" / name) != {}
    # What is done is not submitted again.
    again = submits(study)
    assert again.returncode == 0 and "submitted 3;" in again.stdout


def test_what_is_wrong_is_one_sentence(study):
    done = submits(study, "--sbatch=--time=0")
    assert done.returncode == 2 and "sbatch refused" in done.stderr and "invalid time" in done.stderr
    (study / "bin" / "sbatch").unlink()
    done = submits(study)
    assert done.returncode == 2 and "--launcher slurm needs sbatch, which is not here" in done.stderr
    assert done.stderr.count("\n") == 1
    bad = subprocess.run(
        [sys.executable, "-m", "looptim", "study", "main", "--out", str(study / "x"), "--launcher", "pbs"],
        capture_output=True,
        text=True,
    )
    assert bad.returncode == 2 and "--launcher is slurm or left out" in bad.stderr
