"""Ctrl-C before there is anything to save."""

import subprocess
import sys


def test_ctrl_c_during_an_import_that_would_swallow_it_ends_the_process_with_one_line(tmp_path):
    (tmp_path / "greedy.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
    )
    (tmp_path / "brx_first.py").write_text(
        "import signal, sys\nfrom brx import __main__\n"
        "signal.signal(signal.SIGINT, __main__._interrupt)\nimport greedy\nprint('went on')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", "import runpy; runpy.run_path('brx_first.py')"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "brx: interrupted\n")
