"""A stage's result is made once for what it came from; one that is not whole is never taken for one that is."""

import pytest

from lit_epgan.speech.stages import CONTENTS, Stages, digest_of_result, is_whole


@pytest.fixture
def stages(tmp_path):
    return Stages(tmp_path)


class Maker:
    """Writes two files, and counts how often it was asked to."""

    def __init__(self, text="whole"):
        self.text, self.calls = text, 0

    def __call__(self, folder):
        self.calls += 1
        (folder / "a.txt").write_text(self.text)
        (folder / "b.txt").write_text(self.text)


def test_the_same_origin_is_made_once_and_another_one_anew(stages):
    make = Maker()
    folder = stages.result("stage", {"x": 1}, make)
    assert stages.result("stage", {"x": 1}, make) == folder
    assert make.calls == 1
    assert stages.result("stage", {"x": 2}, make) != folder
    assert make.calls == 2


def test_a_result_is_called_by_its_content(stages):
    one, same = (stages.result("stage", k, Maker()) for k in (1, 2))
    other = stages.result("stage", 3, Maker("other"))
    assert digest_of_result(one) == digest_of_result(same) != digest_of_result(other)


def test_what_breaks_off_leaves_nothing_behind_its_name(stages):
    def breaks_off(folder):
        (folder / "a.txt").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stages.result("stage", 1, breaks_off)
    make = Maker()
    folder = stages.result("stage", 1, make)
    assert make.calls == 1
    assert (folder / "a.txt").read_text() == "whole"


@pytest.mark.parametrize("damage", ["cut", "missing", "no list", "torn list"])
def test_a_damaged_result_is_made_anew(stages, damage):
    folder = stages.result("stage", 1, Maker())
    if damage == "cut":
        (folder / "b.txt").write_text("who")
    elif damage == "missing":
        (folder / "b.txt").unlink()
    elif damage == "no list":
        (folder / CONTENTS).unlink()
    else:
        (folder / CONTENTS).write_text('{"a.txt": [5,')
    assert not is_whole(folder)
    make = Maker()
    assert is_whole(stages.result("stage", 1, make))
    assert make.calls == 1


def test_what_another_process_has_finished_meanwhile_is_left_to_its_readers(stages, monkeypatch):
    """Both make the same; the later one takes the earlier one's, whose files stay what they were."""
    kept = []

    def make(folder):
        Maker()(folder)
        monkeypatch.setattr("os.getpid", lambda: -1)
        kept.append((stages.result("stage", 1, Maker()) / "a.txt").stat().st_ino)

    folder = stages.result("stage", 1, make)
    assert [(folder / "a.txt").stat().st_ino] == kept
    assert [path.name for path in stages.root.iterdir()] == [folder.name]
