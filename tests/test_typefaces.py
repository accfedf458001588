"""Typefaces: how their characters are drawn, who takes part and who judges."""

import re

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from lit_epgan.datamodules import TypefacesDataModule
from lit_epgan.datamodules.partition import deal
from lit_epgan.lib import typefaces
from lit_epgan.lib.errors import MissingFileError, UserError
from lit_epgan.lib.typefaces import CHARACTERS, INK, LIST, read_typefaces
from lit_epgan.metrics import image_classifiers
from tests.fonts_tree import FAMILIES, SHIPPED, UPRIGHT, write_fonts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_fonts(tmp_path_factory.mktemp("fonts"))


@pytest.fixture(scope="module")
def families(folder):
    return read_typefaces(folder) | read_typefaces(folder, judges=True)


def rows_of(image, above=64):
    """First row, end of rows, first column, end of columns of what is inked."""
    rows, columns = (image > above).any(1).nonzero().flatten(), (image > above).any(0).nonzero().flatten()
    return int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1


def test_a_family_is_its_upright_fonts_with_all_characters(families):
    assert {name: len(labels) // 62 for name, (_, labels) in families.items()} == UPRIGHT
    for images, labels in families.values():
        assert images.shape == (len(labels), 1, 28, 28)
        assert images.dtype == torch.uint8
        assert labels.view(-1, 62).equal(torch.arange(62).expand(len(labels) // 62, 62))


def test_characters_share_size_and_baseline_fill_the_square_and_stand_in_the_middle(families):
    for images, _ in families.values():
        for font in images[:, 0].split(62):
            boxes = torch.tensor([rows_of(image) for image in font])
            top, bottom, left, right = boxes.unbind(1)
            extent = max(int(bottom.max() - top.min()), int((right - left).max()))
            assert extent in (INK - 1, INK)
            ends = torch.tensor([rows_of(image, above=0)[2:] for image in font])
            assert (ends.double().mean(1) - 14).abs().max() <= 0.5
            assert abs(int(top.min() + bottom.max()) / 2 - 14) <= 1
            flat = bottom[[CHARACTERS.index(c) for c in "EFHILMNTZhiklmnrxz"]]
            assert flat.max() - flat.min() <= 1
            assert (bottom - top)[CHARACTERS.index("O")] > (bottom - top)[CHARACTERS.index("o")]


def test_an_image_shows_its_character(families):
    """Drawn large by Pillow itself and shrunk, each character is nearest to its own image."""
    large = ImageFont.truetype(SHIPPED / "DejaVuSans.ttf", 200)
    images = families["dejavu-sans"][0][:62, 0].float()
    told = "ABEGKMQRWaegkmqrty23478"
    for character in told:
        sheet = Image.new("L", (280, 280))
        ImageDraw.Draw(sheet).text((140, 210), character, fill=255, font=large, anchor="ms")
        first = np.asarray(sheet.resize((28, 28), Image.Resampling.BOX)).astype(np.float32)
        shown = _cut(torch.from_numpy(first.copy()))
        distances = [(_cut(image) - shown).square().sum() for image in images[[CHARACTERS.index(c) for c in told]]]
        assert told[int(torch.stack(distances).argmin())] == character


def _cut(image):
    """What is inked, stretched to 16 x 16."""
    top, bottom, left, right = rows_of(image)
    inked = image[None, None, top:bottom, left:right]
    return torch.nn.functional.interpolate(inked, (16, 16), mode="bilinear", antialias=True)


def test_judging_families_take_part_in_nothing_and_all_others_do(folder, families, monkeypatch):
    judges = {"dejavu-mono", "stix"}
    assert set(read_typefaces(folder, judges=True)) == judges
    assert set(read_typefaces(folder)) == set(FAMILIES) - judges
    data = TypefacesDataModule(str(folder), held_out=0.2, batch_size=4).data
    assert len(data.train) == 5
    held_out = set(FAMILIES) - judges - set(data.train)
    assert len(data.test) == sum(62 * UPRIGHT[name] for name in held_out)
    for name, own in data.train.items():
        image, label = own[5]
        assert torch.equal(image, families[name][0][5].float() / 127.5 - 1)
        assert label == 5
    seen = {}
    monkeypatch.setattr(image_classifiers, "trained", lambda kind, data: seen.update(data=data, kind=kind))
    image_classifiers.typefaces_classifier(str(folder))
    torch.testing.assert_close(seen["data"].train, families["stix"][0].float() / 127.5 - 1)
    torch.testing.assert_close(seen["data"].test, families["dejavu-mono"][0].float() / 127.5 - 1)


def test_the_same_files_are_drawn_once_and_others_anew(tmp_path, monkeypatch, caplog):
    folder, cache = write_fonts(tmp_path / "fonts"), tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    files = []
    monkeypatch.setattr(typefaces, "drawn", lambda path, draw=typefaces.drawn: files.append(path) or draw(path))
    first, once = read_typefaces(folder), len(files)
    again = read_typefaces(folder)
    assert once == len(files) > 0
    assert {name: [t.tolist() for t in own] for name, own in again.items()} == {
        name: [t.tolist() for t in own] for name, own in first.items()
    }
    (kept,) = cache.rglob("typefaces-*.pt")
    for link in (folder / "modern" / "files").iterdir():
        link.unlink()
        link.symlink_to(SHIPPED / "cmb10.ttf")
    changed = read_typefaces(folder)
    assert changed["modern"][0].equal(first["modern-bold"][0])
    assert len(files) == 2 * once
    kept.write_bytes(kept.read_bytes()[:1000])
    for link in (folder / "modern" / "files").iterdir():
        link.unlink()
        link.symlink_to(SHIPPED / "cmr10.ttf")
    assert read_typefaces(folder)["modern"][0].equal(first["modern"][0])
    assert f"{kept} is torn" in caplog.text


@pytest.mark.parametrize("clients", [1, 5, 7])
def test_dealt_at_random_are_the_same_images_in_equal_parts(folder, clients):
    def all_of(data):
        return sorted((label, image.numpy().tobytes()) for own in data.train.values() for image, label in own)

    by_family, dealt_, again = (
        TypefacesDataModule(str(folder), held_out=0.2, batch_size=4, iid_clients=k).data
        for k in (None, clients, clients)
    )
    assert all_of(dealt_) == all_of(by_family)
    assert [image.equal(other) for (image, _), (other, _) in zip(dealt_.test, by_family.test, strict=True)]
    sizes = [len(own) for own in dealt_.train.values()]
    assert len(sizes) == clients
    assert max(sizes) - min(sizes) <= 1
    for name, own in dealt_.train.items():
        assert dealt_.labels[name].tolist() == [label for _, label in own]
        assert len(dealt_.labels[name].unique()) > min(40, len(own) // 2)
        assert dealt_.labels[name].equal(again.labels[name])


def test_more_clients_than_images_are_refused(folder):
    with pytest.raises(UserError, match=r"cannot be dealt to 10000 clients: set --data.iid_clients lower"):
        TypefacesDataModule(str(folder), held_out=0.2, batch_size=4, iid_clients=10_000).data  # noqa: B018


def test_the_list_names_three_hundred_families_once_with_a_version_and_a_licence():
    lines = LIST.read_text().splitlines()
    names = [
        re.fullmatch(r"@fontsource/([a-z0-9-]+)@\d+\.\d+\.\d+ (OFL-1.1|Apache-2.0|MIT|UFL-1.0)", line)[1]
        for line in lines
    ]
    assert len(set(names)) == len(names) == 300
    assert names == sorted(names)


def test_no_fonts_a_damaged_one_and_too_few_to_judge_are_one_sentence(tmp_path):
    with pytest.raises(MissingFileError, match=r"npm install .*typefaces.txt"):
        read_typefaces(tmp_path / "nowhere")
    (tmp_path / "loose.ttf").symlink_to(SHIPPED / "DejaVuSans.ttf")
    with pytest.raises(MissingFileError, match="one for each family"):
        read_typefaces(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "font.ttf").symlink_to(SHIPPED / "DejaVuSans.ttf")
    with pytest.raises(UserError, match="holds too few typefaces: place at least seven"):
        image_classifiers.typefaces_classifier(str(tmp_path))
    whole = (SHIPPED / "DejaVuSans.ttf").read_bytes()
    for content in (b"", b"no font at all", whole[:3000], whole[: len(whole) // 2]):
        (tmp_path / "own" / "other.ttf").write_bytes(content)
        with pytest.raises(UserError, match=r"other.ttf cannot be read as a font .*mend or remove it"):
            read_typefaces(tmp_path, judges=True)


NAMES = [f"user-{k}" for k in range(40)]


def dealt(split, own_seed=0):
    names, others = deal(NAMES, 0.25, None, 7, split, own_seed)
    assert sorted(names + others) == sorted(NAMES)
    assert len(others) == 10
    return set(others)


def test_nobody_held_out_in_tuning_is_held_out_elsewhere_and_each_seed_draws_its_own():
    fixed, tuned = dealt("fixed"), dealt("tuning")
    assert not fixed & tuned
    drawn = [dealt("by_seed", seed) for seed in range(20)]
    assert not tuned & set().union(*drawn)
    assert set().union(*drawn) == set(NAMES) - tuned
    assert len(set(map(frozenset, drawn))) == 20
    assert dealt("by_seed", 3) == drawn[3]
    with pytest.raises(UserError, match="holds out twice as many"):
        deal(NAMES, 0.5, None, 7, "tuning")
