"""What is kept in the user's cache is taken to the byte or made again; a cache that fails ends no run."""

import logging
from pathlib import Path

import pytest
import torch

from lit_epgan.lib import atomic, tensor_file
from lit_epgan.lib.cache import cache_folder, load_tensors, save_tensors
from lit_epgan.metrics import image_classifiers, image_scores
from lit_epgan.metrics.image_scores import Reference, reference
from tests.traps import Trap, flipped

TENSORS = {"a": torch.arange(5.0), "b": torch.ones(2, 3)}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(atomic, "_said", set())
    return cache_folder()


def assert_found_or_equal(file: Path) -> None:
    """Of 50 changed bytes in what is kept there."""
    content = file.read_bytes()
    expected = tensor_file.load(file, sealed=True)
    found = 0
    for damaged in flipped(content):
        file.write_bytes(damaged)
        state = load_tensors(file, expected)
        found += state is None
        assert state is None or all(torch.equal(state[name], expected[name]) for name in expected)
    assert found == 50
    file.write_bytes(next(flipped(content)))


def test_cached_features_with_a_changed_byte_are_made_again(cache, caplog):
    extractor, images = image_classifiers.DigitsClassifier().eval(), torch.rand(8, 1, 8, 8)

    def seen() -> Reference:
        return reference(extractor, lambda: iter(images.split(5)))

    expected = seen()
    (file,) = (cache / "reference").iterdir()
    assert_found_or_equal(file)
    caplog.clear()
    found = seen()
    assert torch.equal(found.features, expected.features)
    assert (found.statistics.mean == expected.statistics.mean).all()
    assert (found.statistics.covariance == expected.statistics.covariance).all()
    assert f"{file} is damaged: its bytes are not those that were saved; it is now {file.name}.damaged" in caplog.text
    assert sorted(path.name for path in file.parent.iterdir()) == [file.name, f"{file.name}.damaged"]


def test_a_cached_classifier_with_a_changed_byte_is_trained_again(cache, monkeypatch):
    monkeypatch.setattr(image_classifiers.DigitsClassifier, "least_accuracy", -1)
    trained: list[int] = []
    classifier = image_classifiers.DigitsClassifier
    monkeypatch.setattr(image_classifiers, "train", lambda *_: trained.append(1) or classifier())
    image_classifiers.digits_classifier()
    (file,) = cache.glob("[!.]*")  # beside the lock
    assert_found_or_equal(file)
    image_classifiers.digits_classifier()
    image_classifiers.digits_classifier()
    assert trained == [1, 1]
    assert sorted(path.name for path in cache.glob("[!.]*")) == [file.name, f"{file.name}.damaged"]


def test_a_file_of_other_content_is_set_aside(cache, caplog):
    path, marker = cache / "x.pt", cache.parent / "code-was-run"
    for content, said in (
        ([1, 2], "holds something else"),
        ({"a": TENSORS["a"]}, "holds something else"),
        (TENSORS | {"b": Trap(marker)}, "holds objects whose code would be run"),
    ):
        caplog.clear()
        tensor_file.save(content, path)
        assert load_tensors(path, TENSORS) is None
        assert said in caplog.text
        assert not path.exists()
    assert not marker.exists()
    torch.save(TENSORS, path)  # from before files had a digest
    assert load_tensors(path, TENSORS) is None
    assert "has no digest" in caplog.text
    assert load_tensors(path, TENSORS) is None  # nothing there: nothing to say
    assert len(caplog.records) == 2


@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_what_cannot_be_kept_is_said_once(cache, trouble, monkeypatch, caplog):
    if trouble == "read-only":
        path = Path("/proc/nowhere/x.pt")
    else:
        path = cache / "x.pt"
        cache.mkdir()
        monkeypatch.setattr("socket.gethostname", lambda: "here")
        monkeypatch.setattr("os.getpid", lambda: 1)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            if trouble == "full":
                (cache / ".x.pt.here.1.part").symlink_to("/dev/full")
            save_tensors({"a": torch.randn(100_000)}, path)
    assert caplog.text.count("Nothing can be kept in the cache") == 1
    assert load_tensors(path, "a") is None
    assert not cache.exists() or not list(cache.iterdir())


def test_two_processes_that_keep_the_same_do_not_write_to_one_file(cache, monkeypatch, caplog):
    """The second finishes while the first is in the middle of its save."""
    path, save = cache / "x.pt", torch.save

    def interrupted(obj: object, file: object) -> None:
        save(obj, file)
        monkeypatch.setattr(torch, "save", save)
        monkeypatch.setattr("os.getpid", lambda: -1)
        save_tensors(TENSORS, path)
        monkeypatch.undo()

    monkeypatch.setattr(torch, "save", interrupted)
    save_tensors(TENSORS, path)
    assert not caplog.records  # the first has found its own file where it left it
    found = load_tensors(path, TENSORS)
    assert torch.equal(found["b"], TENSORS["b"])
    assert [each.name for each in cache.iterdir()] == ["x.pt"]


def test_features_for_which_there_is_no_room_are_computed(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    extractor = image_classifiers.DigitsClassifier().eval()
    assert image_scores.reference(extractor, lambda: iter([torch.rand(4, 1, 8, 8)])).features.shape == (4, 64)
