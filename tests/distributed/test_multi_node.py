"""Two "nodes" on this machine, each a torchrun of its own with two processes, as the Slurm script starts them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from brx.config.loading import dump_config
from brx.distributed.launch import free_port
from brx.train.loop import train
from tests.train.helpers import losses, tiny_config

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"

# Stand-ins for Slurm's commands: the nodes' names, and the command on every node at one time.
SCONTROL = "#!/bin/sh\necho 127.0.0.1\necho 127.0.0.1\n"
SRUN = '#!/bin/sh\n"$@" & first=$!\n"$@" & second=$!\nwait $first && wait $second\n'


@pytest.mark.slow
def test_two_nodes_are_one_run(tmp_path):
    config = tiny_config(tmp_path, "training.iterations=12")
    train(config, tmp_path / "one")
    (tmp_path / "tiny.yaml").write_text(dump_config(config))
    commands = tmp_path / "bin"
    commands.mkdir()
    torchrun = f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    for name, content in {"scontrol": SCONTROL, "srun": SRUN, "torchrun": torchrun}.items():
        (commands / name).write_text(content)
        (commands / name).chmod(0o755)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "PORT": str(free_port()),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "2",
    }
    found = subprocess.run(
        ["bash", SCRIPT, tmp_path / "tiny.yaml", "--out", tmp_path / "two"],
        env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
    # Rank 0 writes, wherever it is, and only once; every rank its own stage.
    assert found.stderr.count("iteration 12: validation loss") == 1
    assert len(list((tmp_path / "two" / "checkpoints" / "00000012").glob("stage-*.pt"))) == 4


def test_documentation_names_the_scripts_options():
    documented = set(re.findall(r"--rdzv-[a-z]+|--nnodes|--nproc-per-node", (ROOT / "docs/multi-node.md").read_text()))
    assert documented == set(re.findall(r"--rdzv-[a-z]+|--nnodes|--nproc-per-node", SCRIPT.read_text()))
