"""A user's own images: both layouts are read alike, and every mistake is named with its row."""

import numpy as np
import pytest
import torch
from PIL import Image

from lit_epgan.datamodules.folder import FolderDataModule
from lit_epgan.lib.errors import UserError
from tests.refusals import assert_refused

RED = (255, 0, 0)


def save(path, color=RED, size: tuple[int, int] = (8, 8), mode: str = "RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, color).save(path)
    return path


def manifest(root, text: str):
    file = root / "images.csv"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.fixture
def images(tmp_path):
    for name in "abcdef":
        save(tmp_path / f"{name}.png")
    return tmp_path


def loaded(path, **options) -> FolderDataModule:
    datamodule = FolderDataModule(str(path), image_size=options.pop("image_size", 8), **options)
    datamodule.setup()
    return datamodule


def counts(datasets) -> dict[str, int]:
    return {name: len(dataset) for name, dataset in datasets.items()}


def test_clients_and_labels_are_folders(tmp_path):
    for client, label, n in [("north", "cat", 2), ("north", "dog", 1), ("south", "dog", 3)]:
        for i in range(n):
            save(tmp_path / client / label / f"{i}.png")
    (tmp_path / "north" / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / ".hidden").mkdir()
    datamodule = loaded(tmp_path)
    assert counts(datamodule.data.train) == {"north": 3, "south": 3}
    assert datamodule.label_names == ["cat", "dog"]
    assert datamodule.data.labels["north"].tolist() == [0, 0, 1]
    assert datamodule.data.val is datamodule.data.test is None


def test_split_folders_come_before_clients(tmp_path):
    for split, client, n in [("train", "a", 3), ("train", "b", 2), ("val", "b", 1), ("test", "c", 4)]:
        for i in range(n):
            save(tmp_path / split / client / "x" / f"{i}.jpg")
    data = loaded(tmp_path).data
    assert counts(data.train) == {"a": 3, "b": 2}
    assert counts(data.val) == {"b": 1}
    assert len(data.test) == 4


@pytest.mark.parametrize(
    ("train", "val", "test"),
    [("Train", "Val", "Test"), ("training", "validation", "testing"), ("TRAINING", "Valid", "TESTING")],
)
def test_what_people_call_splits_are_splits(tmp_path, train, val, test):
    """Else the test images would be a client's, and trained on."""
    for n, split in enumerate((train, val, test), start=1):
        for i in range(n):
            save(tmp_path / "folder" / split / "a" / f"{i}.png")
            save(tmp_path / f"{split}-{i}.png")
    names = [f"{split}-{i}.png,a,{split}" for n, split in enumerate((train, val, test), start=1) for i in range(n)]
    for source in (tmp_path / "folder", manifest(tmp_path, "\n".join(["path,client,split", *names]))):
        data = loaded(source).data
        assert counts(data.train) == {"a": 1}
        assert counts(data.val) == {"a": 2}
        assert len(data.test) == 3


def test_without_label_folders_a_batch_is_images_alone(tmp_path):
    save(tmp_path / "a" / "1.png")
    save(tmp_path / "b" / "1.PNG")
    data = loaded(tmp_path).data
    assert data.labels is None
    assert len(data.train["a"].fetch([0])) == len(data.train["b"][0]) == 1


def test_a_manifest_gives_what_the_folders_give(images):
    rows = ["a.png,007,10,train", "b.png,007,2,train", "", "c.png,NA,10,train", "d.png,NA,2,val", "e.png,,2,test"]
    byte_order_mark = "\ufeff"  # as spreadsheets write it
    datamodule = loaded(manifest(images, byte_order_mark + "\n".join(["Path,client,label,split", *rows])))
    data = datamodule.data
    assert counts(data.train) == {"007": 2, "NA": 1}
    assert datamodule.label_names == ["2", "10"]
    assert data.labels["007"].tolist() == [1, 0]
    assert counts(data.val) == {"NA": 1}
    assert len(data.test) == 1
    assert data.train["007"].paths == [str(images / "a.png"), str(images / "b.png")]


def test_a_manifest_is_a_table_of_path_and_client_at_least(images):
    data = loaded(manifest(images, "client,path\nx,a.png\ny,b.png\n")).data
    assert counts(data.train) == {"x": 1, "y": 1}
    assert data.labels is None
    assert_refused("CSV table in UTF-8", loaded, images / "a.png")


@pytest.fixture
def elsewhere(images):
    own = images / "own"
    save(own / "in.png")
    (own / "link.png").symlink_to(images / "a.png")
    (own / "folder").symlink_to(images)
    (own / "1" / "2").mkdir(parents=True)
    (own / "deep").symlink_to("1/2")  # from where ``../..`` is the manifest's folder; without the link, the one above
    return own


@pytest.mark.parametrize("name", ["../a.png", "{images}/a.png", "link.png", "folder/a.png", "deep/../../a.png"])
def test_a_manifest_names_files_of_its_folder_unless_others_are_allowed(elsewhere, name):
    named = name.format(images=elsewhere.parent)
    file = manifest(elsewhere, f"path,client\nin.png,x\n{named},y\n")
    assert_refused(r"line 3: .*png lies outside of .*, or set --data\.outside", loaded, file)
    assert counts(loaded(file, outside=True).data.train) == {"x": 1, "y": 1}


def test_a_manifest_may_name_its_own_files_in_any_way_but_no_circle(elsewhere):
    (elsewhere / "again.png").symlink_to("in.png")
    file = manifest(elsewhere, f"path,client\n{elsewhere}/in.png,x\n../own/again.png,y\n")
    assert counts(loaded(file).data.train) == {"x": 1, "y": 1}
    (elsewhere / "circle.png").symlink_to("circle.png")
    with pytest.raises(UserError, match=r"line 2: 'circle\.png' is no name of a file"):
        loaded(manifest(elsewhere, "path,client\ncircle.png,x\n"))


def test_pixels_are_scaled_and_color_is_converted(tmp_path):
    save(tmp_path / "a" / "red.png", RED)
    save(tmp_path / "a" / "white.png", 255, mode="L")
    red, white = loaded(tmp_path).data.train["a"].fetch([0, 1])[0]
    assert red.shape == (3, 8, 8)
    assert torch.equal(red[:, 0, 0], torch.tensor([1.0, -1.0, -1.0]))
    assert torch.equal(white, torch.ones(3, 8, 8))
    grey = loaded(tmp_path, color="grayscale")
    assert grey.shape == (1, 8, 8)
    assert grey.data.train["a"].fetch([0])[0].unique().item() == pytest.approx(76 / 127.5 - 1)  # .299 * 255


def test_the_shorter_side_is_resized_and_the_middle_is_kept(tmp_path):
    strip = np.zeros((20, 60, 3), np.uint8)
    strip[:, 20:40] = 255
    (tmp_path / "a").mkdir()
    Image.fromarray(strip).save(tmp_path / "a" / "strip.png")
    datamodule = loaded(tmp_path, image_size=10)
    (image,) = datamodule.data.train["a"][0]
    assert image.shape == datamodule.shape == (3, 10, 10)
    assert torch.equal(image[:, :, 2:8], torch.ones(3, 10, 6))
    assert image[:, :, 0].max() < 1


def write_pgm(path, values: np.ndarray, most: int) -> None:
    path.write_bytes(f"P5\n8 8\n{most}\n".encode() + values.astype(">u2").tobytes())


@pytest.mark.parametrize("kind", ["png", "tif", "16-bit pgm", "12-bit pgm"])
def test_more_than_eight_bits_keep_their_range(tmp_path, kind):
    (tmp_path / "a").mkdir()
    most = 4095 if kind == "12-bit pgm" else 65535
    ramp = np.linspace(0, most, 64).astype(np.uint16).reshape(8, 8)
    path = tmp_path / "a" / f"scan.{kind[-3:]}"
    write_pgm(path, ramp, most) if kind.endswith("pgm") else Image.fromarray(ramp).save(path)
    (image,) = loaded(tmp_path, color="grayscale").data.train["a"][0]
    expected = torch.tensor(ramp / most * 2 - 1, dtype=torch.float32)
    assert torch.allclose(image[0], expected, atol=1.01 / 255)


@pytest.mark.parametrize("kind", [np.float32, np.int32])
@pytest.mark.filterwarnings("ignore:left out")
def test_pixels_whose_white_is_not_known_are_refused_by_name(tmp_path, kind):
    (tmp_path / "a").mkdir()
    Image.fromarray(np.linspace(0, 1000, 64).astype(kind).reshape(8, 8)).save(tmp_path / "a" / "scan.tif")
    assert_refused(r"scan\.tif cannot be read as an image \(its pixels are .* of 32 bits", loaded, tmp_path)
    save(tmp_path / "a" / "x.png")
    assert counts(loaded(tmp_path, on_error="skip").data.train) == {"a": 1}


def test_photographs_stand_upright(tmp_path):
    (tmp_path / "a").mkdir()
    picture = Image.fromarray(np.repeat(np.array([[0], [255]], np.uint8), 4, 0).repeat(8, 1))  # dark above light
    orientation = Image.Exif()
    orientation[0x0112] = 3  # stored upside down
    picture.save(tmp_path / "a" / "photo.png", exif=orientation)
    (image,) = loaded(tmp_path, color="grayscale").data.train["a"][0]
    assert image[0, 0].tolist() == [1.0] * 8
    assert image[0, -1].tolist() == [-1.0] * 8


@pytest.mark.parametrize("cache", [True, False])
def test_images_are_read_when_asked_for_and_kept_only_if_wanted(tmp_path, cache):
    path = save(tmp_path / "a" / "x.png", RED)
    dataset = loaded(tmp_path, cache=cache).data.train["a"]
    save(path, (0, 0, 255))
    assert dataset.fetch([0])[0][0, 2, 0, 0] == 1
    save(path, RED)
    assert dataset.fetch([0])[0][0, 2, 0, 0] == (1 if cache else -1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("file,client\na.png,x\n", ["no column 'path'", "file, client"]),
        ("path,label\na.png,x\n", ["no column 'client'"]),
        ("", ["no column 'path'", "nothing"]),
        ("path,client\na.png,x\nzz.png,x\n", ["line 3", "there is no file", "zz.png"]),
        ("path,client\na.png,x\n\nb.png,x,y\n", ["line 4", "3 fields", "2 columns"]),
        ("path,client\n,x\n", ["line 2", "path is empty"]),
        ("path,client\na.png,x\nb.png,\n", ["line 3", "client is empty"]),
        ("path,client,split\na.png,x,train\nb.png,x,held\n", ["line 3", "'held'", "train, val, test"]),
        ("path,client,split\na.png,x,train\nb.png,x,\n", ["line 3", "split is empty"]),
        ("path,client,split\na.png,x,test\n", ["no image for training"]),
        ("path,client\n", ["no image for training"]),
        ("path,client,split\na.png,x,train\nb.png,y,val\n", ["line 3", "client y", "none for training"]),
        ("path,client,label\na.png,x,1\nb.png,x,\n", ["line 3", "has no label"]),
        ("path,client,client\na.png,x,y\n", ["more than one column 'client'", "path, client, client"]),
        ('path,client\na.png,"x\ny"\nb.png\n', ["line 4", "1 fields"]),
        ("path,client,split\na.png,x,train\n./a.png,x,test\n", ["line 3", "a.png", "listed already in line 2"]),
    ],
)
def test_a_mistake_in_a_manifest_is_one_sentence_with_its_row(images, text, words):
    file = manifest(images, text)
    with pytest.raises(UserError) as error:
        loaded(file)
    assert "\n" not in str(error.value)
    assert str(images) in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_mistakes_in_a_folder_are_named(tmp_path):
    assert_refused(r"no folder or CSV file at .*nowhere", loaded, tmp_path / "nowhere")
    assert_refused("no image for training", loaded, tmp_path)
    (tmp_path / "a").mkdir()
    assert_refused("Client a is empty", loaded, tmp_path)
    save(tmp_path / "a" / "1.png")
    save(tmp_path / "b" / "cat" / "1.png")
    assert_refused(r"1\.png has no label", loaded, tmp_path)
    save(tmp_path / "a" / "cat" / "1.png")
    assert_refused("a holds images beside folders", loaded, tmp_path)
    save(tmp_path / "train" / "b" / "cat" / "1.png")
    assert_refused(r"mixes split folders with others \(a\)", loaded, tmp_path)


def test_images_of_nobody_are_named(tmp_path):
    save(tmp_path / "train" / "a" / "1.png")
    save(tmp_path / "top.png")
    assert_refused(r"top\.png is in no client's folder", loaded, tmp_path)
    assert_refused(r"1\.png is in no client's folder", loaded, tmp_path / "train" / "a")
    (tmp_path / "top.png").rename(tmp_path / "train" / "beside.png")
    assert_refused(r"beside\.png is in no client's folder", loaded, tmp_path)


@pytest.mark.parametrize("place", ["a/Test", "a/cat/validation"])
def test_splits_below_clients_are_no_labels(tmp_path, place):
    save(tmp_path / "a" / "cat" / "1.png")
    save(tmp_path / place / "2.png")
    assert_refused(f"{place} means a split, not a label", loaded, tmp_path)


def test_two_folders_of_one_split_are_refused(tmp_path):
    save(tmp_path / "Train" / "a" / "1.png")
    save(tmp_path / "training" / "a" / "1.png")
    assert_refused("Train and training both mean the split train", loaded, tmp_path)


def test_an_unreadable_image_is_named_and_refused_and_a_truncated_one_when_it_is_read(images):
    (images / "b.png").write_text("no image")
    with pytest.raises(UserError, match=r"b\.png cannot be read as an image .*--data.on_error skip"):
        loaded(manifest(images, "path,client\na.png,x\nb.png,x\n"))
    path = images / "b.png"
    Image.effect_noise((64, 64), 50).save(path)
    path.write_bytes(path.read_bytes()[:-1000])
    dataset = loaded(manifest(images, "path,client\na.png,x\nb.png,x\n")).data.train["x"]
    assert_refused(r"b\.png cannot be read", dataset.fetch, [0, 1])


def test_skip_leaves_unreadable_and_truncated_images_out_and_says_which(images):
    (images / "b.png").write_text("no image")
    Image.effect_noise((64, 64), 50).save(images / "c.png")
    (images / "c.png").write_bytes((images / "c.png").read_bytes()[:-1000])
    file = manifest(images, "path,client\na.png,x\nb.png,x\nc.png,x\nd.png,y\n")
    with pytest.warns(UserWarning, match=r"left out 2 unreadable images: .*b\.png, .*c\.png"):
        data = loaded(file, on_error="skip").data
    assert counts(data.train) == {"x": 1, "y": 1}


@pytest.mark.filterwarnings("ignore:left out")
def test_skipping_may_not_empty_a_client(images):
    (images / "b.png").write_text("no image")
    assert_refused("Client y is empty", loaded, manifest(images, "path,client\na.png,x\nb.png,y\n"), on_error="skip")
