"""Real processes over gloo: the trajectory does not depend on their number, and they fail and stop
together."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from brx.config.loading import dump_config
from brx.distributed.launch import _Rank, _watch, rank_and_world_size, report_error
from brx.distributed.processes import _check_watchdog
from brx.errors import RunError, UserError
from brx.runs import checkpoint
from brx.train.loop import train
from tests.distributed.worker import announce, connect, equality_configs, prepare_slowly, work
from tests.processes import free_port, start, start_brx, start_ranks
from tests.train.helpers import losses, steps_of, tiny_config, wait_for_lines, wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"

has_proc = pytest.mark.skipif(not Path("/proc").exists(), reason="finds the ranks in /proc")


def torchrun_command(num_ranks, *arguments):
    ranks = [
        "--nproc-per-node",
        str(num_ranks),
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
    ]
    return [sys.executable, "-m", "torch.distributed.run", *ranks, *map(str, arguments)]


TORCHRUN_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def torchrun(num_ranks, *arguments):
    return subprocess.run(
        torchrun_command(num_ranks, *arguments),
        capture_output=True,
        text=True,
        env=TORCHRUN_ENVIRONMENT,
        timeout=900,
        check=False,
    )


def start_torchrun(errors, num_ranks, *arguments):
    """Start it; what it and its ranks say goes into the file `errors`."""
    with errors.open("w") as file:
        return subprocess.Popen(
            torchrun_command(num_ranks, *arguments), env=TORCHRUN_ENVIRONMENT, stderr=file
        )


def run_workers(num_ranks, folder, *jobs):
    """Let several processes do jobs of `tests.distributed.worker`."""
    ranks = start_ranks(num_ranks, lambda rank, **place: start(work, folder, jobs, **place))
    for rank in ranks:
        finish(rank)


def command(path, folder, devices, *options):
    return start_brx("train", path, "--devices", devices, "--out", folder / "run", *options)


def finish(process, code=0):
    """Wait for a command to end with this exit code; gives the last line that it says."""
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == code, stderr
    return stderr.splitlines()[-1] if stderr else ""


def train_on_one_device(folder, which):
    """The runs of `equality_configs` in this process, but those that are there already."""
    torch.set_num_threads(1)
    for name, config in equality_configs(folder, which).items():
        if not (folder / "r1" / name).exists():
            train(config, folder / "r1" / name)


@pytest.fixture(scope="module")
def equality_folder(tmp_path_factory):
    """Keeps the runs of `equality_configs`, by the number of devices."""
    return tmp_path_factory.mktemp("equality")


@pytest.fixture(scope="module")
def two_ranks(equality_folder):
    """The folder after two processes, started once, have done several jobs."""
    train_on_one_device(equality_folder, "few")
    begun = tiny_config(equality_folder, "training.stop_after=15")
    train(begun, equality_folder / "resumed")
    run_workers(2, equality_folder, "few", "resume", "stop")
    return equality_folder


def check_trajectories(folder, num_ranks, which):
    """Assert that several devices have trained as one has."""
    for name in equality_configs(folder, which):
        expected = folder / "r1" / name
        found = folder / f"r{num_ranks}" / name
        # AdamW: to the last bit. Basis rotation batches the matrices of a device, so that the
        # products may be rounded differently.
        tolerance = 0.0 if name.startswith("pipedream") else 1e-5
        for one, other in zip(losses(expected), losses(found), strict=True):
            assert one.keys() == other.keys()
            for key in one:
                assert other[key] == pytest.approx(one[key], rel=tolerance, abs=0), (
                    name,
                    one["iteration"],
                    key,
                )
        (last,) = {path.name for path in checkpoint.list_checkpoints(expected)[-1:]}
        for path in sorted((expected / "checkpoints" / last).glob("*.pt")):
            weights, others = (
                torch.load(run / "checkpoints" / last / path.name, weights_only=True)["versions"][
                    "weights"
                ]
                for run in (expected, found)
            )
            torch.testing.assert_close(others, weights, rtol=tolerance, atol=tolerance)


def test_two_devices_train_as_one(two_ranks):
    check_trajectories(two_ranks, 2, "few")


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "which"), [(2, "rest"), (3, "few"), (4, "all")])
def test_trajectory_is_equal_on_more_devices(num_ranks, which, equality_folder):
    train_on_one_device(equality_folder, which)
    run_workers(num_ranks, equality_folder, which)
    check_trajectories(equality_folder, num_ranks, which)


def check_stopped(folder, num_ranks):
    """Assert that all ranks have stopped at one iteration, with nothing on its way."""
    (saved,) = checkpoint.list_checkpoints(folder / "stopped")
    iteration = int(saved.name)
    # A segment ends on the way to the stop. Rank 0 chooses an iteration 2 R - 1 after its own when
    # it sees the request, which may be a few updates after the request was made.
    assert 21 < iteration <= 20 + 2 * num_ranks - 1 + num_ranks
    for rank in range(num_ranks):
        found = json.loads((folder / f"stop-{rank}.json").read_text())
        assert found == {"status": "interrupted", "iteration": iteration, "in_flight": []}


def test_two_stopped_ranks_are_empty(two_ranks):
    check_stopped(two_ranks, 2)


@pytest.mark.slow
def test_four_stopped_ranks_are_empty(tmp_path):
    run_workers(4, tmp_path, "stop")
    check_stopped(tmp_path, 4)


def test_two_devices_resume_the_run_of_one(two_ranks):
    train(tiny_config(two_ranks), two_ranks / "straight")
    assert steps_of(two_ranks / "resumed") == steps_of(two_ranks / "straight")


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "balance"), [(3, "count"), (2, "time")])
def test_resumes_on_another_number_of_devices(devices, balance, tmp_path):
    path = written(tmp_path, f"pipeline.devices={devices}", f"pipeline.balance={balance}")
    train(tiny_config(tmp_path), tmp_path / "straight")
    train(tiny_config(tmp_path, "training.stop_after=15"), tmp_path / "run")
    finish(start_brx("train", path, "--out", tmp_path / "run", "--resume"))
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "straight")


def written(folder, *overrides):
    path = folder / "tiny.yaml"
    path.write_text(dump_config(tiny_config(folder, *overrides)))
    return path


def children(process):
    return list(
        map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    )


def running(path, *options, lines=6, devices=3, is_saved=False):
    """Start or resume a run; gives the launcher and its ranks once there are new lines of metrics,
    and a checkpoint, if `is_saved`."""
    metrics = path.parent / "run" / "metrics.jsonl"
    before = metrics.read_text().count("\n") if metrics.exists() else 0
    process = command(path, path.parent, devices, "--resume", *options)
    wait_for_lines(metrics, before + lines, process)
    if is_saved:
        wait_until(lambda: checkpoint.list_checkpoints(metrics.parent), process)
    ranks = children(process)
    assert len(ranks) == (devices if devices > 1 else 0)
    return process, ranks


def write_long(folder):
    """The file of a run that does not end by itself within a test."""
    length = ["training.iterations=4000", "training.stop_after=1200"]
    return written(folder, *length, "training.log_every=4")


@pytest.fixture
def long_config(tmp_path):
    return write_long(tmp_path)


def gone(pids):
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def listening(process):
    """The addresses at which a process listens, as /proc writes them: in hexadecimal, by port."""
    files = [os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir()]
    own = {file[len("socket:[") : -1] for file in files if file.startswith("socket:")}
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in own:
                addresses.append(local.partition(":")[0])
    return addresses


@dataclass(frozen=True)
class Lost:
    """A run of three ranks, after the last was killed."""

    listened: set[str]  # the addresses, while all were there
    told: str
    left: list[int]  # ranks that outlived the command
    checkpoints: list[Path]


@pytest.fixture(scope="module")
def lost_rank(tmp_path_factory):
    path = write_long(tmp_path_factory.mktemp("lost"))
    process, ranks = running(path, is_saved=True)
    listened = set().union(*map(listening, ranks))
    os.kill(ranks[2], signal.SIGKILL)
    told = finish(process, 1)
    left = [rank for rank in ranks if not gone([rank])]
    return Lost(listened, told, left, checkpoint.list_checkpoints(path.parent / "run"))


@has_proc
def test_killed_rank_is_named(lost_rank):
    assert lost_rank.told == "brx: rank 2 was killed by SIGKILL; the checkpoints are kept"


@has_proc
def test_killed_rank_takes_the_others_down(lost_rank):
    assert lost_rank.left == []


@has_proc
def test_killed_rank_leaves_a_checkpoint(lost_rank):
    assert lost_rank.checkpoints


@has_proc
def test_ranks_listen_on_the_loopback_interface_alone(lost_rank):
    assert lost_rank.listened == {"0100007F"}  # 127.0.0.1


@pytest.mark.slow
@has_proc
@pytest.mark.parametrize(
    ("rank", "number", "expected"),
    [
        (0, signal.SIGKILL, "was killed by SIGKILL"),
        (1, signal.SIGSTOP, "did not answer for 5 s"),
    ],
)
def test_lost_rank_ends_the_run(rank, number, expected, long_config):
    timeout_s = 5 if number == signal.SIGSTOP else 300
    timeout = f"pipeline.timeout_s={timeout_s}"
    process, ranks = running(long_config, "--set", timeout, is_saved=True)
    os.kill(ranks[rank], number)
    assert finish(process, 1) == f"brx: rank {rank} {expected}; the checkpoints are kept"
    assert gone(ranks)
    assert checkpoint.list_checkpoints(long_config.parent / "run")


@has_proc
@pytest.mark.parametrize(
    ("devices", "number", "to_ranks"),
    [
        (1, signal.SIGHUP, False),
        pytest.param(3, signal.SIGINT, False, marks=pytest.mark.slow),
        (2, signal.SIGTERM, True),  # as Slurm does
    ],
)
def test_signal_ends_all_ranks_with_a_checkpoint(devices, number, to_ranks, long_config):
    process, ranks = running(long_config, devices=devices)
    for rank in ranks if to_ranks else []:
        os.kill(rank, number)
    process.send_signal(number)
    assert "continue with --resume" in finish(process, 130)
    assert gone(ranks)
    assert (
        json.loads((long_config.parent / "run" / "summary.json").read_text())["status"]
        == "interrupted"
    )
    stopped = losses(long_config.parent / "run")[-1]["iteration"]
    assert checkpoint.list_checkpoints(long_config.parent / "run")[-1].name == f"{stopped:08d}"


@pytest.mark.slow
@has_proc
@pytest.mark.parametrize(
    ("num_kills", "overrides"),
    [(1, ["pipeline.delay=2bw", "pipeline.accumulation=3", "pipeline.stash=predict"]), (6, [])],
)
def test_run_killed_at_random_resumes_exactly(num_kills, overrides, tmp_path):
    overrides = [f"training.iterations={60 + 20 * num_kills}", "training.log_every=1", *overrides]
    path = written(tmp_path, *overrides)
    train(tiny_config(tmp_path, *overrides), tmp_path / "straight")
    choose = random.Random(0)
    for kill in range(num_kills):
        process, ranks = running(path, lines=20 if kill == 0 else 5)
        os.kill(choose.choice(ranks), signal.SIGKILL)
        process.communicate(timeout=300)
    finish(command(path, tmp_path, 2, "--resume"))
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")


@has_proc
@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.5, 1.5])
def test_ctrl_c_ends_ranks_before_they_met(long_config, seconds):
    process = command(long_config, long_config.parent, 2)
    while len(ranks := children(process)) < 2:
        time.sleep(0.01)
    time.sleep(seconds)
    for _ in range(4):  # Python loses one now and then while it imports
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):  # another one, while Python exits, would kill it
            process.wait(15)
    finish(process, 130)
    assert gone(ranks)


@pytest.mark.parametrize("value", ["0", "2"])
def test_nccl_without_its_watchdog_is_refused(value, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", value)
    with pytest.raises(UserError, match=f"TORCH_NCCL_ASYNC_ERROR_HANDLING: is {value}"):
        _check_watchdog()


def ended(folder, *programs):
    """Ranks that run these programs."""
    return [
        _Rank(n, subprocess.Popen([sys.executable, "-c", program]), folder / str(n))
        for n, program in enumerate(programs)
    ]


def test_aborted_rank_is_told_with_the_hanging(tmp_path, monkeypatch):
    """As where NCCL's watchdog ends a rank that waits for one which was stopped."""
    monkeypatch.setattr("brx.distributed.launch.GRACE_S", 0.5)
    ranks = ended(tmp_path, "import os; os.abort()", "import time; time.sleep(60)")
    with pytest.raises(RunError, match=r"rank 0 was killed by SIGABRT .* rank 1 still ran"):
        _watch(ranks, [])
    ranks[1].process.kill()
    ranks[1].process.wait()


def test_rank_that_others_lost_by_abort_is_named(tmp_path):
    (tmp_path / "0").write_text(
        '{"brx": {"text": "", "problem": "closed its connection", "peer": 1}}'
    )
    ranks = ended(tmp_path, "exit(1)", "import os; os.abort()")
    with pytest.raises(RunError, match=r"^rank 1 was killed by SIGABRT \(its message is above\);"):
        _watch(ranks, [])


@pytest.mark.parametrize("first", [0, 1])
def test_stopped_rank_is_no_failure_of_others(first, tmp_path):
    (tmp_path / "1").write_text('{"brx": {"text": "the 2 processes cannot meet"}}')
    ends = [
        f"import time; time.sleep({rank != first}); exit({code})"
        for rank, code in enumerate((130, 2))
    ]
    ranks = ended(tmp_path, *ends)
    assert _watch(ranks, [signal.SIGINT]) == 130


@pytest.mark.parametrize(
    ("settings", "status", "error"),
    [
        pytest.param(
            ["optimizer.lr=1e30", "training.warmup_fraction=0.0"],
            "diverged",
            "try a lower optimizer.lr",
            marks=pytest.mark.slow,
        ),
        (
            ["optimizer.method={}/own.py:Failing"],
            "failed",
            "own.py:4: ZeroDivisionError: division by zero",
        ),
    ],
)
def test_error_of_the_last_rank_is_in_summary(settings, status, error, tmp_path):
    """Rank 0, which writes it, sees no more of it than a lost neighbour."""
    failing = (
        "class Failing(Method):\n    def lr_divisor(self, tau, t, T):\n        return 1 / (t "
        "< 15 or tau > 0)\n"
    )
    (tmp_path / "own.py").write_text(f"from brx.methods.method import Method\n{failing}")
    path = written(tmp_path, *(setting.format(tmp_path) for setting in settings))
    assert error in finish(command(path, tmp_path, 2), 1)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == status
    assert error in summary["error"]


@pytest.mark.parametrize(
    ("devices", "override", "expected"),
    [
        pytest.param(
            2,
            "training.iterations=100000",
            "allow it with data.max_epochs=",
            marks=pytest.mark.slow,
        ),
        (
            2,
            "pipeline.delay=[3, 0, 2, 0]",
            "rank 0 of 2 runs 1 forward pass ahead, which needs a delay of at least",
        ),
    ],
    ids=["once data are there", "before"],
)
def test_ranks_that_refuse_the_request_exit_2(devices, override, expected, tmp_path):
    assert expected in finish(command(written(tmp_path, override), tmp_path, devices), 2)
    assert (tmp_path / "data").exists() == ("iterations" in override)
    assert not (tmp_path / "run").exists()


def test_torchrun_tells_what_is_wrong_last(tmp_path):
    """Its own report ends with a rule."""
    found = torchrun(2, "-m", "brx", "train", written(tmp_path), "--set", "model.bloks=3")
    assert found.returncode == 1
    assert (
        "brx: --set model.bloks=3: model.bloks: unknown key, did you mean"
        in found.stderr.splitlines()[-2]
    )


def test_port_in_use_exits_2(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        place["MASTER_PORT"] = str(taken.getsockname()[1])
        command = ["train", written(tmp_path), "--out", tmp_path / "run"]
        process = start_brx(*command, environment=place)
        assert "the port is in use" in finish(process, 2)


def test_network_interface_that_is_not_there_is_named(tmp_path):
    command = ["train", written(tmp_path), "--devices", "2", "--out", tmp_path / "run"]
    process = start_brx(*command, environment={"GLOO_SOCKET_IFNAME": "nowhere0"})
    told = "brx: GLOO_SOCKET_IFNAME nowhere0: the 2 processes cannot meet: no network interface"
    assert finish(process, 2).startswith(told)


def test_rank_taken_twice_exits_2(tmp_path):
    """A second job on the port of the first: only its rank 0 would find the port in use."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = ["train", written(tmp_path), "--out", tmp_path / "run"]
    ranks = [start_brx(*command, environment={**place, "RANK": rank}) for rank in ("0", "1", "1")]
    codes = sorted(rank.wait(120) for rank in ranks[1:])
    assert codes == [0, 2]


def test_processes_with_different_numbers_of_ranks_refuse_to_train(tmp_path):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = ["train", written(tmp_path), "--out", tmp_path / "run"]
    ranks = []
    for rank in range(2):
        own = {"RANK": str(rank), "WORLD_SIZE": str(2 + rank)}
        ranks.append(start_brx(*command, environment={**place, **own}))
    told = "brx: WORLD_SIZE: is 2 for rank 0 and 3 for rank 1, which has joined at MASTER_ADDR"
    assert finish(ranks[0], 2).startswith(told)
    finish(ranks[1], 2)


def test_rank_that_is_lost_before_it_connects_is_told_in_one_line(tmp_path):
    absent, present = start_ranks(
        2, lambda rank, **place: start(connect, tmp_path, rank == 0, **place)
    )
    finish(present)
    absent.kill()
    assert (tmp_path / "error").read_text() == "a rank did not answer for 5 s"


def test_first_announcement_stays(tmp_path):
    ranks = start_ranks(2, lambda rank, **place: start(announce, tmp_path, **place))
    for rank in ranks:
        finish(rank)
    announced = [(tmp_path / f"announced-{rank}").read_text() for rank in range(2)]
    assert announced == ["by rank 0"] * 2


def test_divergence_is_no_rank_s(tmp_path):
    text = "iteration 3: the gradient norm of stage 7 is nan"
    (tmp_path / "0").write_text(json.dumps({"brx": {"text": text, "has_diverged": True}}))
    with pytest.raises(RunError, match=f"^{text}$"):
        _watch(ended(tmp_path, "exit(1)", "exit(0)"), [])


@pytest.mark.slow
def test_ranks_wait_for_one_that_prepares_data_of_its_own(tmp_path):
    ranks = start_ranks(2, lambda rank, **place: start(prepare_slowly, tmp_path, **place))
    for rank in ranks:
        finish(rank)


@pytest.mark.slow
@has_proc
def test_killed_torchrun_is_named_and_leaves_no_rank(long_config):
    run = long_config.parent / "run"
    errors = long_config.parent / "errors"
    process = start_torchrun(errors, 2, "-m", "brx", "train", long_config, "--out", run)
    wait_for_lines(run / "metrics.jsonl", 6, process)
    ranks = children(process)
    process.kill()
    process.wait()
    end = time.monotonic() + 60
    while not gone(ranks):
        assert time.monotonic() < end
        time.sleep(0.1)
    told = [line for line in errors.read_text().splitlines() if line.startswith("brx: ")]
    # A rank may first notice that the other one has ended for this reason.
    assert len(told) == 2
    assert "brx: the launcher closed its connection" in told
    assert all(line.endswith("closed its connection") for line in told)
    assert json.loads((run / "summary.json").read_text())["status"] == "failed"


# Stand-ins for Slurm's commands: the nodes' names, and the command on every node at one time.
STAND_INS = {
    "scontrol": '#!/bin/sh\n[ "$1" = requeue ] && touch requeued\necho 127.0.0.1\necho 127.0.0.1\n',
    "srun": '#!/bin/sh\n"$@" & first=$!\n"$@" & second=$!\nwait $first && wait $second\n',
    "torchrun": f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n',
}


def slurm_job(folder, **stand_ins):
    """Arguments of `subprocess.run` for a job of two nodes in this folder, without Slurm."""
    (commands := folder / "bin").mkdir()
    for name, content in {**STAND_INS, **stand_ins}.items():
        (commands / name).write_text(content)
        (commands / name).chmod(0o755)
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PORT": str(free_port())}
    variables |= {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    variables |= {
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "2",
    }
    return {"env": {**os.environ, **variables}, "cwd": folder}


INTERRUPTED = '{"status": "interrupted", "iteration": %s}'


@pytest.mark.parametrize(
    ("session", "expected"),
    [
        ("exit 1", (1, False)),
        (f"echo '{INTERRUPTED % 9}' > run/summary.json; exit 1", (0, True)),
    ],
    ids=["could not begin", "was interrupted"],
)
def test_job_is_requeued_if_its_own_session_was_interrupted(session, expected, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text(INTERRUPTED % 5)
    job = slurm_job(tmp_path, srun=f"#!/bin/sh\n{session}\n")
    ended = subprocess.run(
        ["bash", SCRIPT, "quick", "--out", "run"], **job, timeout=60, check=False
    )
    assert (ended.returncode, (tmp_path / "requeued").exists()) == expected


@pytest.mark.slow
def test_two_nodes_are_one_run(tmp_path):
    """Each "node" is a torchrun of its own with two processes, as the Slurm script starts them."""
    path = written(tmp_path, "training.iterations=12")
    train(tiny_config(tmp_path, "training.iterations=12"), tmp_path / "one")
    command = ["bash", SCRIPT, path, "--out", tmp_path / "two"]
    started = slurm_job(tmp_path)
    stopped = subprocess.run([*command, "--stop-after", "1s"], **started, timeout=400, check=False)
    assert (stopped.returncode, (tmp_path / "requeued").exists()) == (0, True)
    found = subprocess.run(command, **started, capture_output=True, text=True, timeout=400)
    assert found.returncode == 0, found.stderr[-3000:]
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
    # Rank 0 writes, wherever it is, and only once; every rank its own stage.
    assert found.stderr.count("iteration 12: validation loss") == 1
    assert len(list((tmp_path / "two" / "checkpoints" / "00000012").glob("stage-*.pt"))) == 4


def test_error_is_printed_where_its_file_cannot_be(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    monkeypatch.setenv("BRX_LAUNCHED", "1")
    assert report_error(RunError("it failed")) is False


def test_rank_outside_the_world_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"RANK: must be less than WORLD_SIZE \(2\), got 2"):
        rank_and_world_size()


def test_rank_without_a_world_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UserError, match="RANK: is 1, but WORLD_SIZE is not set"):
        rank_and_world_size()


def test_rank_without_content_is_no_rank(monkeypatch):
    monkeypatch.setenv("RANK", "")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert rank_and_world_size() is None


def test_ranks_with_different_settings_refuse_to_train(tmp_path):
    """As two `torchrun` nodes with different commands: every rank says the same, and exits 2."""
    command = ["train", written(tmp_path), "--out", tmp_path / "run", "--set"]
    ranks = start_ranks(
        2, lambda rank, **place: start_brx(*command, f"optimizer.lr={0.01 / (rank + 1)}", **place)
    )
    said = [finish(rank, 2) for rank in ranks]
    expected = "brx: the ranks disagree: optimizer.lr is 0.01 on rank 0 and 0.005 on rank 1"
    assert [line.partition(";")[0] for line in said] == [expected] * 2
