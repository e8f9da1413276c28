"""What is added from outside with one file and one line, without a change to the package."""

from __future__ import annotations

from pathlib import Path

import pytest

# ---------------------------------------------------------------------------------------------------------- launchers

TOY_LAUNCHER = '''
import subprocess

from torchfleet.launch.job_spec import Task, describe_task
from torchfleet.launch.launchers import LAUNCHERS


class ToyLauncher:
    """Starts the workers one after another, without servers."""

    def add_options(self, parser):
        parser.add_argument("--toy", metavar="NAME", help="a job of this name, one process at a time")

    def takes(self, options):
        return options.toy is not None

    def describe(self, job, options):
        return [line for task in tasks(job, options) for line in describe_task(task, job.command, f"of {options.toy}")]

    def run(self, job, options):
        log_dir = job.make_run_dir()
        for task in tasks(job, options):
            with open(log_dir / task.log_name, "w") as log:
                subprocess.run(job.command, env=task.environment, stdout=log, check=True)
        print(f"{options.toy} has finished; {job.max_restart} restarts were allowed")
        return 0


def tasks(job, options):
    return [Task("worker", i, {"TOY_INDEX": f"{options.toy}.{i}"}) for i in range(job.num_workers)]


LAUNCHERS["toy"] = ToyLauncher()
'''


def test_a_launcher_is_one_file_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib
    import sys

    from torchfleet.launch import cli
    from torchfleet.launch.launchers import LAUNCHERS

    (tmp_path / "toy_launcher.py").write_text(TOY_LAUNCHER)
    script, log_dir = tmp_path / "train.py", tmp_path / "log"
    script.write_text("import os, sys\nprint(os.environ['TOY_INDEX'], sys.argv[1:])\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        importlib.import_module("toy_launcher")
        arguments = ("--log_dir", str(log_dir), "--worker_num", "2", "--max_restart", "3", "--toy", "ball")
        assert cli.main([*arguments, "--dry_run", str(script), "--epochs", "4"]) == 0
        command = f"{sys.executable} {script} --epochs 4"
        assert capsys.readouterr().out.splitlines() == [
            f"worker 0: {command}   (of ball)",
            "    TOY_INDEX=ball.0",
            f"worker 1: {command}   (of ball)",
            "    TOY_INDEX=ball.1",
        ]
        assert not log_dir.exists()
        assert cli.main([*arguments, str(script), "--epochs", "4"]) == 0
        assert capsys.readouterr().out == "ball has finished; 3 restarts were allowed\n"
        for i in range(2):
            assert (log_dir / "latest" / f"workerlog.{i}").read_text() == f"ball.{i} ['--epochs', '4']\n"
        assert cli.main(["--dry_run", str(script)]) == 0  # other command lines go where they went before
        assert "FLEET_ROLE=SERVER" in capsys.readouterr().out
    finally:
        LAUNCHERS.pop("toy", None)
        sys.modules.pop("toy_launcher", None)


@pytest.mark.slow
def test_a_launcher_of_servers_imports_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    (tmp_path / "train.py").touch()
    code = (
        "import sys; from torchfleet.launch.cli import main; "
        f"status = main(['--dry_run', {str(tmp_path / 'train.py')!r}]); sys.exit(status or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
