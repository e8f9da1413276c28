"""The files that `fleetrun slurm` writes. tests/integration/test_slurm.py submits such files."""

from __future__ import annotations

import os
import shlex
import subprocess
import unicodedata
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.searches import examples

from torchfleet.launch.cli import main, parser


def written(tmp_path: Path, *options: str) -> str:
    (tmp_path / "train.py").touch()
    path = tmp_path / "job.sbatch"
    assert main(["slurm", *options, "-o", str(path), str(tmp_path / "train.py"), "--epochs", "3"]) == 0
    subprocess.run(["bash", "-n", str(path)], check=True)
    return path.read_text()


def test_a_job_with_a_limit_is_asked_to_save_before_it(tmp_path: Path) -> None:
    text = written(tmp_path, "--server_num", "2", "--worker_num", "4", "--nodes", "3", "--time", "4:00:00",
                   "--requeue", "--save_on_stop", "model", "--resume", "--init_model model")  # fmt: skip
    for line in ("--ntasks=6", "--nodes=3", "--time=4:00:00", "--signal=USR1@120", "--requeue", "--open-mode=append"):
        assert f"#SBATCH {line}\n" in text
    assert "[ -e model/manifest.json ] && resume=(--init_model model)" in text
    assert text.endswith('--epochs 3 "${resume[@]}"\n')
    assert "--cluster slurm --server_num 2 --worker_num 4 --save_on_stop model --requeue" in text


def test_what_the_tasks_give_to_other_tools_is_passed_on(tmp_path: Path) -> None:
    options = ["--metrics_port", "9400", "--metrics_host", "0.0.0.0", "--log_format", "json"]
    assert " ".join(options) in written(tmp_path, *options)


def test_logs_are_text_where_that_is_said_and_the_variable_says_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--log_format" not in written(tmp_path)
    monkeypatch.setenv("FLEET_LOG_FORMAT", "json")
    assert "--log_format text" in written(tmp_path, "--log_format", "text").split("srun")[-1]
    assert "--log_format json" in written(tmp_path)


def test_two_components_have_their_own_resources(tmp_path: Path) -> None:
    text = written(tmp_path, "--server_num", "2", "--worker_num", "4", "--het", "--server_memory", "2GB",
                   "--worker_cpus", "8", "--worker_gpus", "1", "--partition", "long")  # fmt: skip
    servers, workers = text.split("#SBATCH hetjob\n")
    assert "--ntasks=2\n" in servers
    assert "--mem-per-cpu=2048M\n" in servers
    assert "gpus" not in servers
    assert "--ntasks=4\n#SBATCH --cpus-per-task=8\n#SBATCH --gpus-per-task=1\n" in workers
    assert text.count("--partition=long") == 2
    assert {"--het-group=0", "--cpus-per-task=1", "--het-group=1", "--cpus-per-task=8"} <= set(srun_words(text))
    assert "--het-group=0,1" in srun_words(written(tmp_path, "--het", "--server_memory", "2GB"))


def test_cores_of_a_task_are_said_to_srun_too_of_each_component_its_own(tmp_path: Path) -> None:
    """From 22.05 on srun does not take them over from sbatch: a task would have one core."""
    assert "--cpus-per-task" not in srun_words(written(tmp_path))
    alike = srun_words(written(tmp_path, "--server_cpus", "4", "--worker_cpus", "4"))
    assert "--cpus-per-task=4" in alike
    assert ":" not in alike
    ranks = srun_words(written(tmp_path, "--nproc_per_node", "2", "--worker_cpus", "8", "--insecure"))
    assert "--cpus-per-task=8" in ranks
    words = srun_words(written(tmp_path, "--het", "--server_cpus", "1", "--worker_cpus", "8"))
    servers, workers = words[: words.index(":")], words[words.index(":") + 1 :]
    assert {"--het-group=0", "--cpus-per-task=1", "--kill-on-bad-exit=1"} <= set(servers)
    assert {"--het-group=1", "--cpus-per-task=8", "--kill-on-bad-exit=1"} <= set(workers)
    assert servers[servers.index("--cluster") :] == workers[workers.index("--cluster") :]


def srun_words(text: str) -> list[str]:
    """What bash makes of the line that starts the tasks."""
    return shlex.split(text[text.index("\nsrun ") + 1 :].replace("\\\n", " "))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("ctr", "--job-name=ctr"),
        ("two words", '--job-name="two words"'),
        ("it's #1", '--job-name="it\'s #1"'),
        ('a "b" \\ c', '--job-name="a \\"b\\" \\\\ c"'),
    ],
)
def test_a_job_name_is_one_value_to_sbatch(tmp_path: Path, name: str, line: str) -> None:
    assert f"#SBATCH {line}\n" in written(tmp_path, "--job_name", name)


def test_a_script_with_a_space_in_its_name_gives_the_job_one_name(tmp_path: Path) -> None:
    script = tmp_path / "my train.py"
    script.touch()
    assert main(["slurm", "-o", str(tmp_path / "job"), str(script)]) == 0
    assert '#SBATCH --job-name="my train"\n' in (tmp_path / "job").read_text()


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1, max_size=20)
HOSTILE = TEXT | st.sampled_from(
    ["$(touch made)", "`touch made`", "'; touch made #", '"; touch made; "', "a\ntouch made #", "a\r\ntouch made",
     "${PATH}", "~", "*", "-x", "--worker_num=9", "a\\", "!", "\\\n touch made", "a' \ntouch made '", "&& touch made"]
)  # fmt: skip


PATHS = ("log_dir", "key_dir", "log_store")


@settings(max_examples=examples(20))
@given(st.data())
def test_what_bash_gives_to_srun_is_what_the_user_gave(data: st.DataObject) -> None:
    """The written file runs in bash, with an srun that records its words: no text runs, and none is lost."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").touch()
        chosen = data.draw(st.sets(st.sampled_from((*PATHS, "job_name", "partition", "account", "sbatch"))))
        named = {name: data.draw(HOSTILE, name) for name in sorted(chosen)}
        resumed = data.draw(st.lists(HOSTILE, max_size=3), "resumed")
        arguments = data.draw(st.lists(HOSTILE.filter(lambda text: text != "--"), max_size=3), "arguments")
        named |= {"save_on_stop": data.draw(HOSTILE.filter(lambda text: "/" not in text and text[0] != "."), "save")}
        options = [f"--{name}={value}" for name, value in named.items()]
        options += [f"--resume={shlex.join(resumed)}"] if resumed else []
        options += ["--durability", "log"] if "log_store" in named else []
        code = main(["slurm", *options, "-o", f"{folder}/job", f"{folder}/train.py", *arguments])
        if any(unicodedata.category(letter) in ("Cc", "Zl", "Zp") for letter in "".join([*named.values(), *resumed])):
            assert code == 2
            assert not (folder / "job").exists()
            return
        assert code == 0
        (folder / named["save_on_stop"]).mkdir()
        (folder / named["save_on_stop"] / "manifest.json").touch()
        words = run_in_bash(folder)
        task = parser().parse_args(words[words.index("--cluster") :])
        assert [task.script, *task.arguments] == [f"{folder}/train.py", *arguments, *resumed]
        assert {name: getattr(task, name) for name in named if hasattr(task, name)} == {
            name: value for name, value in named.items() if name in (*PATHS, "save_on_stop")
        }


@pytest.mark.parametrize("option", ["log_dir", "save_on_stop", "key_dir", "log_store", "metrics_host", "output"])
def test_a_name_with_a_line_break_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    (tmp_path / "train.py").touch()
    more = ["--durability", "log"] if option == "log_store" else []
    assert main(["slurm", *more, f"--{option}", f"{tmp_path}/a\nb", str(tmp_path / "train.py")]) == 2
    assert f"--{option}" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["train.py"]


def test_a_script_with_a_line_break_in_its_name_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "a\ntouch made #.py"
    script.touch()
    assert main(["slurm", str(script)]) == 2


def test_a_command_in_resume_is_text(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "manifest.json").touch()
    resume = "--init_model $(touch made) `touch made` 'two words' $HOME"
    options = ["--save_on_stop", "saved", "--resume", resume]
    assert main(["slurm", *options, "-o", str(tmp_path / "job"), str(tmp_path / "train.py")]) == 0
    words = ["--init_model", "$(touch", "made)", "`touch", "made`", "two words", "$HOME"]
    assert run_in_bash(tmp_path)[-7:] == words


def run_in_bash(folder: Path) -> list[str]:
    """The words that srun gets when bash runs the file. Nothing else is made in the folder."""
    fake = folder / "bin" / "srun"
    fake.parent.mkdir()
    fake.write_text(f"""#!/bin/bash\nprintf '%s\\0' "$@" > {folder}/words\n""")
    fake.chmod(0o755)
    before = set(os.listdir(folder))
    path = f"{fake.parent}:{os.environ['PATH']}"
    subprocess.run(["bash", str(folder / "job")], check=True, cwd=folder, env={"PATH": path}, timeout=30)
    assert set(os.listdir(folder)) - before == {"words"}
    return (folder / "words").read_text().split("\0")[:-1]


def test_logs_of_servers_are_asked_for_in_the_tasks(tmp_path: Path) -> None:
    options = ["--durability", "log", "--log_store", str(tmp_path / "store"), "--fsync_ms", "0.5"]
    words = srun_words(written(tmp_path, *options))
    task = parser().parse_args(words[words.index("--cluster") :])
    assert (task.durability, task.log_store, task.fsync_ms) == ("log", str(tmp_path / "store"), 0.5)


def test_a_collective_job_has_one_task_a_node(tmp_path: Path) -> None:
    text = written(tmp_path, "--nproc_per_node", "8", "--nodes", "4", "--worker_gpus", "8", "--insecure")
    assert "#SBATCH --ntasks-per-node=1\n#SBATCH --ntasks=4\n#SBATCH --nodes=4\n#SBATCH --gpus-per-task=8\n" in text
    assert "--cluster slurm --nproc_per_node 8 --insecure" in text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--server_num", "auto"], "give a number"),
        (["--worker_num", "2:4"], "give one number"),
        (["--worker_num", "0"], "--worker_num must be at least 1"),
        (["--time", "soon"], "--time expects"),
        (["--resume", "--init model"], "--resume needs --save_on_stop"),
        (["--server_cpus", "2", "--worker_cpus", "8"], "add --het"),
        (["--worker_gpus", "1"], "Add --het"),
        (["--het", "--worker_cpus", "1.5"], "--worker_cpus"),
        (["--nproc_per_node", "8", "--worker_cpus", "0.5", "--worker_memory", "8GB", "--insecure"], "--worker_cpus"),
        (["--partition", "a\n#SBATCH --uid=0"], "one line"),
        (["--nproc_per_node", "2", "--worker_num", "3"], "use one kind"),
        (["--durability", "log"], "--log_store DIR"),
        (["--log_store", "store"], "--durability log"),
        (["--durability", "log", "--log_store", "store", "--nproc_per_node", "2"], "--durability"),
        (["--job_name", "a\nb"], "one line"),
        (["--save_on_stop", "model", "--resume", "--init 'model"], "--resume"),
        (["--save_on_stop", "model\udcff"], "UTF-8"),
    ],
)
def test_what_cannot_work_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], told: str
) -> None:
    (tmp_path / "train.py").touch()
    assert main(["slurm", *options, str(tmp_path / "train.py")]) == 2
    assert told in capsys.readouterr().err
