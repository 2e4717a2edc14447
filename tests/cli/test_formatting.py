"""Files and folders that commands are to write to, and cannot."""

from pathlib import Path

import pytest

from hmt.base.errors import DiskWriteError
from hmt.cli.formatting import write_text

NOWHERE = "/proc/nowhere"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("bench", "serve", "--html", NOWHERE), "name a file that can be written"),
        (("eval", "--json", NOWHERE), "--json /proc/nowhere cannot be used"),
        (("calibrate", "kv", "--text", "x", "--out", NOWHERE), "--out /proc/nowhere cannot be"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_measured(hmt, words, told):
    outcome = hmt(*words)
    assert outcome.code == 2 and told in outcome.err and not outcome.out


def test_a_refusal_leaves_files_and_folders_as_they_were(hmt, tmp_path):
    kept, new = tmp_path / "kept.json", tmp_path / "new" / "new.json"
    kept.write_text("kept")
    for file in (kept, new):  # the text cannot be read: nothing is measured
        assert hmt("eval", "--json", file, "--text", tmp_path).code == 2
    assert kept.read_text() == "kept" and not new.exists()


def test_a_folder_is_no_file(hmt, tmp_path):
    outcome = hmt("eval", "--json", tmp_path)
    assert outcome.code == 2 and "Is a directory" in outcome.err


def test_a_text_that_is_none_is_told(hmt, tmp_path):
    file = tmp_path / "text"
    file.write_bytes(b"\xff\xfe\x00")
    outcome = hmt("eval", "--text", file)
    assert outcome.code == 2 and f"{file} cannot be read" in outcome.err


def test_results_that_do_not_fit_are_told(tmp_path):
    write_text(tmp_path / "a" / "b", "µ")
    assert (tmp_path / "a" / "b").read_bytes() == "µ".encode()
    with pytest.raises(DiskWriteError, match=r"/dev/full could not be written .No space left"):
        write_text(Path("/dev/full"), "x")
