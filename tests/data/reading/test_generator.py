"""Generators: the user's own code, alike in a pipe and in the process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.messages import names, naming
from support.paths import ROOT

import torchfleet as fleet
from torchfleet.base.errors import DataError
from torchfleet.data.queue_dataset import QueueDataset
from torchfleet.data.reading import reader
from torchfleet.data.slots import Ragged, SampleLayout, Slot

READER = """
    import torchfleet as fleet

    class Reader(fleet.MultiSlotDataGenerator):
        def generate_sample(self, line):
            def reader():
                fields = line.split()
                yield [("words", [int(f) for f in fields[1:]]), ("label", [float(fields[0])])]
            return reader

    if __name__ == "__main__":
        Reader().run_from_stdin()
"""
SLOTS = [Slot("words"), Slot("label", dtype="float32", dim=1)]


@pytest.fixture(autouse=True)
def project_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8:strict")  # as in en_US.UTF-8 and most other locales


def write_script(folder: Path, text: str, name: str = "reader.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def load(script: Path) -> dict[str, Any]:
    """The names of a script, as an import would give them."""
    names: dict[str, Any] = {"__name__": "reader"}
    exec(compile(script.read_text(), str(script), "exec"), names)
    return names


def run(script: Path, data: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, str(script)]
    return subprocess.run(
        command, input=data, capture_output=True, timeout=60, check=False, env={**os.environ, **environment}
    )


def printed(script: Path, data: bytes = b"", **environment: str) -> str:
    done = run(script, data, **environment)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def read(path: Path, command: Any, slots: list[Slot] | None = None, **options: Any) -> tuple[list[Any], int]:
    """(the samples, number of skipped lines) with a dataset."""
    dataset = QueueDataset()
    if isinstance(command, Path):
        command = f"{sys.executable} {command}"
    dataset.init(batch_size=3, use_var=slots or SLOTS, pipe_command=command, **options)
    dataset.set_filelist([str(path)])
    samples: list[Any] = []
    for batch in dataset:
        columns = [value.split() if isinstance(value, Ragged) else list(value) for value in batch.values()]
        samples += [[part.tolist() for part in parts] for parts in zip(*columns, strict=True)]
    return samples, dataset.num_skipped


def make(folder: Path, data: bytes) -> Path:
    path = folder / "part-0"
    path.write_bytes(data)
    return path


class Numbers(fleet.MultiSlotDataGenerator):
    """Yields what it was given, whatever the line."""

    def __init__(self, *samples: Any) -> None:  # without super().__init__(), as users write it
        self.samples = samples

    def generate_sample(self, line: str | None) -> Any:
        def reader() -> Iterator[Any]:
            yield from self.samples

        return reader


class Strings(fleet.MultiSlotStringDataGenerator):
    generate_sample = Numbers.generate_sample
    __init__ = Numbers.__init__


def memory_of(generator: Any, capsys: pytest.CaptureFixture[str]) -> str:
    generator.run_from_memory()
    return capsys.readouterr().out


# What is printed


@pytest.mark.slow
def test_a_script_prints_what_training_reads(tmp_path: Path) -> None:
    script = write_script(tmp_path, READER)
    assert printed(script, b"1 10 20\n0\n0.5 7\n") == "2 10 20 1 1.0\n0 1 0.0\n1 7 1 0.5\n"
    assert printed(script, b"") == ""


@pytest.mark.slow
def test_a_pipe_and_the_process_give_equal_tensors(tmp_path: Path) -> None:
    script = write_script(tmp_path, READER)
    rng = np.random.default_rng(0)
    lines = [
        " ".join([repr(rng.normal()), *map(str, rng.integers(-(2**63), 2**63 - 1, rng.integers(0, 6)))])
        for _ in range(500)
    ]
    path = make(tmp_path, ("\r\n".join(lines)).encode())
    shell = subprocess.run(
        f"cat {path} | {sys.executable} {script} > {tmp_path}/printed", shell=True, timeout=60, check=True
    )
    assert shell.returncode == 0
    by_pipe = read(path, script)
    assert by_pipe == read(path, load(script)["Reader"]())
    assert by_pipe == read(tmp_path / "printed", None)
    expected = [[[int(f) for f in line.split()[1:]], [float(np.float32(float(line.split()[0])))]] for line in lines]
    assert by_pipe == (expected, 0)


def test_values_of_every_kind_of_number_are_written_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    values = [
        1,
        -(2**63),
        2**64 - 1,
        True,
        np.int64(5),
        np.float32(0.1),
        np.bool_(True),
        torch.tensor(7),
        0.1,
        1e-30,
        np.float64(1e22),
    ]
    text = memory_of(Numbers([("a", values)]), capsys)
    expected = [
        "11",
        "1",
        str(-(2**63)),
        str(2**64 - 1),
        "1",
        "5",
        repr(float(np.float32(0.1))),
        "1",
        "7",
        "0.1",
        "1e-30",
        "1e+22",
    ]
    assert text.split() == expected


def test_values_may_be_any_sequence_and_samples_any_iterable(capsys: pytest.CaptureFixture[str]) -> None:
    samples = [
        [("a", [1, 2]), ("b", (3.5,))],
        (("a", np.array([1, 2])), ["b", torch.tensor([3.5])]),
        zip(["a", "b"], [range(1, 3), iter([3.5])], strict=True),
        iter([("a", {1: 0, 2: 0}), ("b", [3.5])]),
    ]
    assert memory_of(Numbers(*samples), capsys) == "2 1 2 1 3.5\n" * 4


def test_none_and_lines_without_samples_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert memory_of(Numbers(None, [("a", [1])], None), capsys) == "1 1\n"
    assert memory_of(Numbers(), capsys) == ""
    path = make(tmp_path, b"x\n" * 5)
    assert read(path, Numbers(), [Slot("a")]) == ([], 0)
    assert read(path, Numbers(None, [("a", [1])]), [Slot("a")]) == ([[[1]]] * 5, 0)


def test_a_line_may_yield_several_samples(tmp_path: Path) -> None:
    path = make(tmp_path, b"x\ny")
    samples = [[("a", [i]), ("b", [])] for i in range(4)]
    slots = [Slot("a", dim=1), Slot("b", dtype="float32")]
    assert read(path, Numbers(*samples), slots) == ([[[i], []] for i in range(4)] * 2, 0)


def test_strings_are_written_as_they_stand(capsys: pytest.CaptureFixture[str]) -> None:
    assert memory_of(Strings([("a", ["007", "1e3"]), ("b", ("x",)), ("c", [])]), capsys) == "2 007 1e3 1 x 0\n"


def test_a_string_generator_gives_tensors_too(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import torchfleet as fleet

        class Reader(fleet.MultiSlotStringDataGenerator):
            def generate_sample(self, line):
                def reader():
                    fields = line.split()
                    yield zip(("words", "label"), (fields[1:], fields[:1]))
                return reader

        if __name__ == "__main__":
            Reader().run_from_stdin()
        """,
    )
    path = make(tmp_path, b"0.25 1 2\n1e-3\n")
    expected = ([[[1, 2], [0.25]], [[], [float(np.float32(1e-3))]]], 0)
    assert read(path, script) == read(path, load(script)["Reader"]()) == expected


def test_run_from_memory_prints_the_samples_of_no_line(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import torchfleet as fleet

        class Reader(fleet.MultiSlotDataGenerator):
            def generate_sample(self, line):
                def reader():
                    assert line is None
                    for i in range(3):
                        yield [("a", [i])]
                return reader

        reader = Reader()
        reader.set_batch(2)
        reader.run_from_memory()
        """,
    )
    assert printed(script) == "1 0\n1 1\n1 2\n"


# Groups


class Groups(fleet.MultiSlotDataGenerator):
    """Tells in slot b how large the group was, and turns it around."""

    def generate_sample(self, line: str | None) -> Any:
        return lambda: iter([[("a", [int(line or 0)])]])

    def generate_batch(self, samples: list[Any]) -> Any:
        def batch() -> Iterator[Any]:
            for sample in reversed(samples):
                yield [*sample, ("b", [len(samples)])]

        return batch


@pytest.mark.parametrize(("size", "expected"), [
    (None, [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1)]),
    (1, [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1)]),
    (2, [(2, 2), (1, 2), (4, 2), (3, 2), (5, 1)]),
    (5, [(5, 5), (4, 5), (3, 5), (2, 5), (1, 5)]),
    (100, [(5, 5), (4, 5), (3, 5), (2, 5), (1, 5)]),
])  # fmt: skip
def test_groups_have_at_most_the_size_that_was_set(
    tmp_path: Path, size: int | None, expected: list[tuple[int, int]]
) -> None:
    generator = Groups()
    if size is not None:
        generator.set_batch(size)
    slots = [Slot("a", dim=1), Slot("b", dim=1)]
    samples, _ = read(make(tmp_path, b"1\n2\n3\n4\n5"), generator, slots)
    assert [(a, b) for (a,), (b,) in samples] == expected


def test_without_generate_batch_groups_change_nothing(tmp_path: Path) -> None:
    generator = Numbers([("a", [1])], None, [("a", [2])])
    generator.set_batch(4)
    assert read(make(tmp_path, b"x\n" * 5), generator, [Slot("a")]) == ([[[1]], [[2]]] * 5, 0)


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", None])
def test_an_impossible_size_of_a_group_is_refused(size: Any) -> None:
    with pytest.raises(DataError, match="set_batch"):
        Numbers().set_batch(size)


# What goes wrong

BAD = """
    import torchfleet as fleet

    class Reader(fleet.MultiSlotDataGenerator):
        def generate_sample(self, line):
            def reader():
                line_ = line.rstrip("\\n")
                if line_ == "stop":
                    raise StopIteration
                if line_.startswith("tell"):
                    raise ValueError(f"no number:\\n {line_}")
                if line_ == "names":
                    yield [("other", [1]), ("label", [0])]
                elif line_ == "empty":
                    yield []
                elif line_ == "flat":
                    yield [1, 2]
                elif line_ == "late":
                    yield [("words", [1]), ("label", [0])]
                    raise RuntimeError("after the first sample")
                elif line_ == "text":
                    yield [("words", "12"), ("label", [0])]
                elif line_ == "nan":
                    yield [("words", [1]), ("label", [float("nan")])]
                elif line_ == "wide":
                    yield [("words", [1]), ("label", [0, 1])]
                else:
                    yield [("words", [int(f) for f in line.split()]), ("label", [0])]
            return None if line_ == "none" else reader

        def generate_batch(self, samples):
            def batch():
                for sample in samples:
                    if sample[0][1] == [13]:
                        raise KeyError("unlucky")
                    yield sample
            return batch

    if __name__ == "__main__":
        Reader().run_from_stdin()
""".replace("def reader():\n                line_", "line_", 1).replace(
    'line_ = line.rstrip("\\n")\n                if line_ == "stop"',
    'line_ = line.rstrip("\\n")\n            def reader():\n                if line_ == "stop"',
    1,
)
KINDS = [
    "x",
    "stop",
    "tell",
    "names",
    "empty",
    "flat",
    "late",
    "text",
    "nan",
    "wide",
    "none",
    "13",
    "",
    "tell \udcff",
    "tell é",
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_line_is_skipped_and_counted_alike_in_a_pipe_and_in_the_process(tmp_path: Path, kind: str) -> None:
    script = write_script(tmp_path, BAD)
    path = make(tmp_path, f"1\n{kind}\n2 3\n{kind}\n4".encode("utf-8", "surrogateescape"))
    if kind == "":
        expected: tuple[list[Any], int] = ([[[1], [0]], [[], [0]], [[2, 3], [0]], [[], [0]], [[4], [0]]], 0)
    else:
        expected = ([[[1], [0]], [[2, 3], [0]], [[4], [0]]], 2)
    assert read(path, load(script)["Reader"](), on_bad_line="skip") == expected
    assert read(path, script, on_bad_line="skip") == expected


@pytest.mark.parametrize("kind", ["names", "text", "x"])
def test_a_bad_first_line_does_not_spoil_the_others(tmp_path: Path, kind: str) -> None:
    """Its names count for nothing if it is skipped anyway."""
    script = write_script(tmp_path, BAD.replace('("other", [1])', '("other", None)'))
    path = make(tmp_path, f"{kind}\n1\n2\n".encode())
    expected = ([[[1], [0]], [[2], [0]]], 1)
    assert read(path, load(script)["Reader"](), on_bad_line="skip") == expected
    assert read(path, script, on_bad_line="skip") == expected


def test_all_samples_of_a_group_that_fails_are_counted_alike(tmp_path: Path) -> None:
    script = write_script(tmp_path, BAD.replace("Reader().run", "reader = Reader(); reader.set_batch(3); reader.run"))
    generator = load(script)["Reader"]()
    generator.set_batch(3)
    path = make(tmp_path, b"1\n13\n2\n3\n4\n5\n6\n13\n")
    expected = ([[[3], [0]], [[4], [0]], [[5], [0]]], 5)
    assert read(path, generator, on_bad_line="skip") == read(path, script, on_bad_line="skip") == expected


@pytest.mark.parametrize("kind", ["x", "stop", "tell", "names", "late", "13", "tell \udcff"])
def test_an_exception_in_the_process_is_an_error_with_file_and_line(tmp_path: Path, kind: str) -> None:
    path = make(tmp_path, f"1\n2\n{kind}\n3\n".encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=naming(path, "line 3", "Reader")):
        read(path, load(write_script(tmp_path, BAD))["Reader"]())


def test_the_users_own_exception_is_the_cause_of_the_error(tmp_path: Path) -> None:
    """Its traceback is what leads to the place in their code."""
    with pytest.raises(DataError) as caught:
        read(make(tmp_path, b"1\n13\n"), load(write_script(tmp_path, BAD))["Reader"]())
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("kind", ["x", "stop", "tell", "names", "late", "13", "tell \udcff"])
def test_an_exception_in_a_pipe_is_an_error_with_file_and_line(tmp_path: Path, kind: str) -> None:
    path = make(tmp_path, f"1\n2\n{kind}\n3\n".encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=naming("status 1")) as caught:
        read(path, write_script(tmp_path, BAD))
    assert names(str(caught.value), path)
    assert "line 3" in str(caught.value)


def test_the_first_skipped_line_is_reported_with_its_place_and_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, path = write_script(tmp_path, BAD), make(tmp_path, b"1\n2\ntell\n3\nx\n")
    for command in (load(script)["Reader"](), script):
        read(path, command, on_bad_line="skip")
        text = capsys.readouterr().err
        assert names(text, 2)
        assert "line 3" in text
        assert "ValueError: no number: tell" in " ".join(text.split())
        assert str(path) in text


def test_a_script_at_the_shell_stops_at_a_bad_line(tmp_path: Path) -> None:
    done = run(write_script(tmp_path, BAD), b"1\ntell\n2\n", FLEET_ON_BAD_LINE="")
    assert done.returncode == 1
    assert b"no number" in done.stderr
    assert b"2 1 0" not in done.stdout


def test_a_bad_line_is_told_in_any_locale(tmp_path: Path) -> None:
    script = write_script(tmp_path, BAD)
    text = printed(script, "1\ntell é\n2\n".encode(), FLEET_ON_BAD_LINE="skip", PYTHONIOENCODING="ascii")
    assert text == "1 1 1 0\n!bad input line 2: ValueError: no number: tell é\n1 2 1 0\n"


def test_bytes_that_are_no_text_go_through_a_string_generator_alike(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import torchfleet as fleet

        class Reader(fleet.MultiSlotStringDataGenerator):
            def generate_sample(self, line):
                return lambda: iter([[("words", line.split()), ("label", ["1"])]])

        if __name__ == "__main__":
            Reader().run_from_stdin()
        """,
    )
    path = make(tmp_path, b"1 2\n\xff\xfe\n3\n")
    expected = ([[[1, 2], [1]], [[3], [1]]], 1)
    assert read(path, load(script)["Reader"](), on_bad_line="skip") == expected
    assert read(path, script, on_bad_line="skip") == expected


@pytest.mark.parametrize("values", ["12", b"12", 5, None, ["a"], [None], [[1, 2]], [1 + 2j], [np.str_("a")], [b"1"]])
def test_values_that_are_no_numbers_are_refused_with_their_slot(values: Any) -> None:
    with pytest.raises(DataError, match=naming("'a'")):
        Numbers([("a", values)]).run_from_memory()


@pytest.mark.parametrize("values", ["12", b"12", 5, None])
def test_values_that_are_no_list_of_strings_are_refused_with_their_slot(values: Any) -> None:
    with pytest.raises(DataError, match=naming("'a'")):
        Strings([("a", values)]).run_from_memory()


@pytest.mark.parametrize("second", [[("b", [1])], [("a", [1]), ("b", [1])], [], [("a", [1]), ("a", [1])]])
def test_all_samples_must_have_the_slots_of_the_first(second: Any) -> None:
    with pytest.raises(DataError, match="slots"):
        Numbers([("a", [1])], second).run_from_memory()


@pytest.mark.parametrize("sample", [5, [("a",)], [("a", [1], 2)], ["ab"], {"a": [1]}])
def test_a_sample_that_is_no_list_of_pairs_is_refused(sample: Any) -> None:
    with pytest.raises((DataError, TypeError)):
        Numbers(sample).run_from_memory()


def test_a_class_without_generate_sample_says_what_is_missing(tmp_path: Path) -> None:
    class Empty(fleet.MultiSlotDataGenerator):
        pass

    with pytest.raises(DataError, match=naming("Empty.generate_sample(line)")):
        read(make(tmp_path, b"1\n"), Empty())


def test_names_are_checked_against_use_var_in_the_process(tmp_path: Path) -> None:
    path = make(tmp_path, b"1\n")
    with pytest.raises(DataError, match=naming("part-0", "line 1", "Numbers", "words", "label")):
        read(path, Numbers([("a", [1])]))


def test_a_class_instead_of_an_object_is_refused() -> None:
    with pytest.raises(DataError, match=naming("pipe_command=Groups")):
        QueueDataset().init(use_var=SLOTS, pipe_command=Groups)


@pytest.mark.parametrize("command", ["", 5, ["cat"], print, b"cat"])
def test_a_pipe_command_that_is_none_is_refused(command: Any) -> None:
    with pytest.raises(DataError, match="pipe_command"):
        QueueDataset().init(use_var=SLOTS, pipe_command=command)


def test_a_generator_gets_whole_lines_of_a_compressed_file_however_long(tmp_path: Path) -> None:
    import gzip

    num = 300_000
    path = tmp_path / "part-0.gz"
    path.write_bytes(gzip.compress((" ".join(map(str, range(num))) + "\n7").encode(), 1))

    class Count(fleet.MultiSlotDataGenerator):
        def generate_sample(self, line: str | None) -> Any:
            fields = (line or "").split()
            return lambda: iter([[("a", [len(fields), int(fields[-1])])]])

    assert read(path, Count(), [Slot("a")]) == ([[[num, num - 1]], [[1, 7]]], 0)


def test_a_damaged_file_is_named_in_the_process_too(tmp_path: Path) -> None:
    import gzip

    path = tmp_path / "part-0.gz"
    path.write_bytes(gzip.compress(b"1 2\n" * 100_000)[:-20])
    with pytest.raises(DataError, match=naming(path)):
        read(path, Numbers([("a", [1])]), [Slot("a")])


def test_one_object_serves_several_threads(tmp_path: Path) -> None:
    paths = []
    for i in range(6):
        (tmp_path / str(i)).write_text("".join(f"{i * 1000 + k}\n" for k in range(1000)))
        paths.append(str(tmp_path / str(i)))

    class Ids(fleet.MultiSlotDataGenerator):
        def generate_sample(self, line: str | None) -> Any:
            return lambda: iter([[("a", [int(line or 0)])]])

    generator = Ids()
    generator.set_batch(7)
    dataset = QueueDataset()
    dataset.init(batch_size=64, thread_num=3, use_var=[Slot("a")], pipe_command=generator)
    dataset.set_filelist(paths)
    assert sorted(value for batch in dataset for value in batch["a"].values.tolist()) == list(range(6000))


def test_a_script_whose_output_is_not_wanted_ends(tmp_path: Path) -> None:
    script = write_script(tmp_path, READER)
    path = make(tmp_path, b"1 2 3\n" * 100_000)
    done = subprocess.run(
        f"{sys.executable} {script} < {path} | head -n 1", shell=True, capture_output=True, timeout=60, check=True
    )
    assert done.stdout == b"2 2 3 1 1.0\n"


# Start-up, and scripts that were written for Paddle


def test_a_generator_script_imports_nothing_heavy(tmp_path: Path) -> None:
    """It starts once per file: torch or numba would take seconds each time."""
    heavy = "{'torch', 'numba', 'numpy', 'zmq', 'msgspec', 'fsspec', 'backports'}"
    script = write_script(
        tmp_path,
        READER.replace("int(f) for", "fleet.hash_string(f) for")
        + f"    import sys; print(sorted({heavy} & set(sys.modules)), file=sys.stderr)\n",
    )
    done = run(script, b"1 a b\n")
    assert done.stdout.decode() == f"2 {fleet.hash_string('a')} {fleet.hash_string('b')} 1 1.0\n"
    assert done.stderr.decode() == "[]\n"


LISTS = """
    cont_min_ = [0, -3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    cont_max_ = [20, 600, 100, 50, 64000, 500, 100, 50, 500, 10, 10, 10, 50]
    cont_diff_ = [20, 603, 100, 50, 64000, 500, 100, 50, 500, 10, 10, 10, 50]
    hash_dim_ = 1000001
    continuous_range_ = range(1, 14)
    categorical_range_ = range(14, 40)
"""
PADDLE_1 = f"""
    import torchfleet as dg
{LISTS}
    class CriteoDataset(dg.MultiSlotDataGenerator):

        def generate_sample(self, line):

            def reader():
                features = line.rstrip('\\n').split('\\t')
                dense_feature = []
                sparse_feature = []
                for idx in continuous_range_:
                    if features[idx] == "":
                        dense_feature.append(0.0)
                    else:
                        dense_feature.append(
                            (float(features[idx]) - cont_min_[idx - 1]) /
                            cont_diff_[idx - 1])
                for idx in categorical_range_:
                    sparse_feature.append(
                        [hash(str(idx) + features[idx]) % hash_dim_])
                label = [int(features[0])]
                process_line = dense_feature, sparse_feature, label
                feature_name = ["dense_feature"]
                for idx in categorical_range_:
                    feature_name.append("C" + str(idx - 13))
                feature_name.append("label")

                yield zip(feature_name, [dense_feature] + sparse_feature + [label])

            return reader

    d = CriteoDataset()
    d.run_from_stdin()
"""
PADDLE_2 = f"""
    import torchfleet as fleet
    import os
    import sys
{LISTS}
    class WideDeepDatasetReader(fleet.MultiSlotDataGenerator):

        def line_process(self, line):
            features = line.rstrip('\\n').split('\\t')
            dense_feature = []
            sparse_feature = []
            for idx in continuous_range_:
                if features[idx] == "":
                    dense_feature.append(0.0)
                else:
                    dense_feature.append(
                        (float(features[idx]) - cont_min_[idx - 1]) / cont_diff_[idx - 1])
            for idx in categorical_range_:
                sparse_feature.append(
                    [hash(str(idx) + features[idx]) % hash_dim_])
            label = [int(features[0])]
            return [dense_feature]+sparse_feature+[label]

        def generate_sample(self, line):
            def wd_reader():
                input_data = self.line_process(line)
                feature_name = ["dense_input"]
                for idx in categorical_range_:
                    feature_name.append("C" + str(idx - 13))
                feature_name.append("label")
                yield zip(feature_name, input_data)

            return wd_reader

    if __name__ == "__main__":
        my_data_generator = WideDeepDatasetReader()
        my_data_generator.set_batch(16)

        my_data_generator.run_from_stdin()
"""


@pytest.mark.slow
@pytest.mark.parametrize("text", [PADDLE_1, PADDLE_2])
def test_a_script_written_for_paddle_runs_with_only_its_import_changed(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    rng = np.random.default_rng(1)
    rows = [
        [
            str(rng.integers(2)),
            *(str(v) if v % 5 else "" for v in rng.integers(0, 600, 13)),
            *(f"{v:08x}" for v in rng.integers(0, 9, 26)),
        ]
        for _ in range(40)
    ]
    path = make(tmp_path, ("\n".join("\t".join(row) for row in rows) + "\n").encode())
    samples, num_skipped = read(path, write_script(tmp_path, text), fleet.CriteoFormat.slots())
    again, _ = read(path, f"{sys.executable} {tmp_path}/reader.py", fleet.CriteoFormat.slots())
    assert samples == again
    assert num_skipped == 0
    assert len(samples) == 40
    ids_of: dict[tuple[int, str], int] = {}
    lows, ranges = [0, -3, *[0] * 11], [20, 603, 100, 50, 64000, 500, 100, 50, 500, 10, 10, 10, 50]
    for row, (dense, *ids, label) in zip(rows, samples, strict=True):
        assert label == [int(row[0])]
        numbers = [(int(f) - low) / size if f else 0.0 for f, low, size in zip(row[1:14], lows, ranges, strict=True)]
        assert dense == np.array(numbers).astype(np.float32).tolist()
        for column, (field, (found,)) in enumerate(zip(row[14:], ids, strict=True)):
            assert 0 <= found < 1_000_001
            assert ids_of.setdefault((column, field), found) == found  # one id for one field
    assert len(set(ids_of.values())) > len(ids_of) * 0.99


def test_a_line_without_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MAX_LINE", 1000)
    path = tmp_path / "part-0"
    path.write_bytes(b"1\n" * 3 + b"7" * 5000)
    made = reader.ReadOptions([Slot("a")], Echo())
    source = made.reader(SampleLayout(made.use_var)).source(str(path))
    with pytest.raises(DataError, match=naming(path, "line 4", "1,000")):
        list(made.reader(SampleLayout(made.use_var)).read(str(path), source))


class Echo(fleet.MultiSlotDataGenerator):
    def generate_sample(self, line: str | None) -> Callable[[], Iterator[Any]]:
        return lambda: iter([[("a", [int(line or 0)])]])
