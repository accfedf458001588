"""Emoji from miniatures of the packed packages: pictures, categories, splits, clients, and what is refused."""

import gzip
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from lit_epgan.datamodules.images import ImageDataModule
from lit_epgan.lib import emoji_package
from lit_epgan.lib.emoji_package import CATEGORIES, read_emoji, split_by_emoji
from lit_epgan.lib.errors import MissingFileError, UserError
from lit_epgan.metrics import feature_extractor
from lit_epgan.metrics.image_classifiers import EmojiClassifier
from tests.emoji_tree import EACH, TONES, picture, png, published, write_emoji, write_package
from tests.refusals import assert_refused


def loaded(root, **options) -> ImageDataModule:
    datamodule = ImageDataModule("emoji", str(root), **{"clients": 9, **options})
    datamodule.prepare_data()
    datamodule.setup()
    return datamodule


def test_pictures_have_their_category_whatever_their_colours(tmp_path):
    write_emoji(tmp_path)
    emoji = read_emoji(tmp_path)
    assert emoji.pixels.shape == (2 * EACH * len(CATEGORIES), 3, 32, 32)
    assert torch.equal(emoji.pixels[:, 0], (10 * emoji.categories).byte()[:, None, None].expand(-1, 32, 32))
    assert torch.equal(emoji.pixels[:, 2, 0, 0] == 50, emoji.vendors == 1)
    assert emoji.categories.bincount().tolist() == [2 * EACH] * len(CATEGORIES)
    grey = Image.new("LA", (64, 64), (40, 255))
    palette = Image.new("P", (64, 64), 1)
    palette.putpalette([0, 0, 0, 9, 8, 7])
    changed = {"img/google/64/0-0.png": png(grey), "img/google/64/1-0.png": png(palette)}
    write_package(tmp_path, "google", published("google") | changed)
    assert read_emoji(tmp_path, "google").pixels[:2, :, 0, 0].tolist() == [[40, 40, 40], [9, 8, 7]]


def test_skin_tones_are_further_pictures_of_one_emoji_and_swatches_left_out(tmp_path):
    write_emoji(tmp_path)
    plain, toned = read_emoji(tmp_path, "google"), read_emoji(tmp_path, "google", skin_tones=True)
    assert len(toned.numbers) == len(plain.numbers) + TONES
    number, times = Counter(toned.numbers.tolist()).most_common(1)[0]
    assert times == 1 + TONES
    assert set(toned.categories[toned.numbers == number].tolist()) == {CATEGORIES.index("People & Body")}
    assert 999 not in read_emoji(tmp_path, skin_tones=True).numbers


@pytest.mark.parametrize(("vendor", "blue"), [("google", {100}), ("twitter", {50}), ("both", {100, 50})])
def test_a_vendor_can_be_chosen(tmp_path, vendor, blue):
    write_emoji(tmp_path, ["google", "twitter"] if vendor == "both" else [vendor])
    assert set(read_emoji(tmp_path, vendor).pixels[:, 2].flatten().tolist()) == blue


def test_what_is_transparent_is_white_and_each_pixel_the_mean_of_four(tmp_path):
    """colour a + 255 (1 - a) by hand, then blocks of 2 x 2."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (64, 64, 4), dtype=np.uint8)
    first = "img/google/64/0-0.png"
    write_package(tmp_path, "google", published("google") | {first: png(Image.fromarray(pixels))})
    alpha = pixels[..., 3:] / 255
    opaque = pixels[..., :3] * alpha + 255 * (1 - alpha)
    expected = opaque.reshape(32, 2, 32, 2, 3).mean((1, 3)).transpose(2, 0, 1)
    assert np.abs(read_emoji(tmp_path, "google").pixels[0].numpy() - expected).max() < 1.5


@pytest.mark.parametrize("split", ["fixed", "tuning", "by_seed"])
def test_all_pictures_of_an_emoji_are_on_one_side(tmp_path, split):
    write_emoji(tmp_path)
    train, test = split_by_emoji(read_emoji(tmp_path, skin_tones=True), 7, split)
    assert not set(train.numbers.tolist()) & set(test.numbers.tolist())
    for part in (train, test):
        assert part.categories.unique().tolist() == list(range(9))
        both = set(zip(part.numbers.tolist(), part.vendors.tolist(), strict=True))
        assert {(n, v) for n in part.numbers.tolist() for v in (0, 1)} == both
    shown = len(train.numbers.unique()), len(test.numbers.unique())
    assert shown == (9 * 3, 9 * 1) if split == "tuning" else (9 * 4, 9 * 1)


def test_the_image_federation_is_split_by_emoji_and_clients_hold_a_category_or_a_vendors(tmp_path):
    write_emoji(tmp_path)
    expected, expected_test = split_by_emoji(read_emoji(tmp_path), 3, "by_seed", 5)
    data = loaded(tmp_path, split_seed=3, split="by_seed", seed=5).data
    assert torch.equal(torch.cat(list(data.labels.values())).bincount(), expected.categories.bincount())
    assert torch.equal(data.test.pixels, expected_test.pixels)
    assert torch.equal(next(iter(data.train.values())).pixels, expected.pixels)
    by_category = loaded(tmp_path).data.train
    by_both = loaded(tmp_path, partition="natural", clients=18).data.train
    kinds = lambda client: set(map(tuple, client.pixels[client.rows][:, ::2, 0, 0].tolist()))  # noqa: E731
    assert [kinds(client) for client in by_category.values()] == [{(10 * k, 50), (10 * k, 100)} for k in range(9)]
    assert [kinds(client) for client in by_both.values()] == [{(10 * k, b)} for k in range(9) for b in (100, 50)]
    client = next(iter(loaded(tmp_path, partition="dirichlet", clients=3).data.train.values()))
    image, label = client[0]
    assert image.shape == (3, 32, 32)
    assert image[0, 0, 0].item() == pytest.approx(10 * int(label) / 127.5 - 1, abs=1e-6)


def test_missing_packages_are_a_command_in_a_folder(tmp_path):
    both = "npm pack emoji-datasource-google@16.0.0 emoji-datasource-twitter@16.0.0"
    with pytest.raises(MissingFileError, match=f"{tmp_path} lacks: run `{both}` in that folder"):
        loaded(tmp_path)
    write_emoji(tmp_path, ["google"])
    with pytest.raises(MissingFileError, match="run `npm pack emoji-datasource-twitter@"):
        feature_extractor("emoji", str(tmp_path))
    assert_refused("choose google, twitter or both", loaded, tmp_path, vendor="apple")


def refusal(root) -> str:
    with pytest.raises(UserError) as refused:
        read_emoji(root, "google")
    assert not isinstance(refused.value, MissingFileError)
    assert "delete it, and run `npm pack emoji-datasource-google@16.0.0` in that folder anew." in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("keep", [0, 10, 500])
def test_a_truncated_package_is_refused(tmp_path, keep):
    path = write_package(tmp_path, "google", published("google"))
    path.write_bytes(path.read_bytes()[:keep])
    assert path.name in refusal(tmp_path)


def test_a_package_with_a_flipped_byte_another_or_one_without_end_is_refused(tmp_path, monkeypatch):
    path = write_package(tmp_path, "google", published("google"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    assert path.name in refusal(tmp_path)
    write_package(tmp_path, "google", published("twitter"))
    assert "it is emoji-datasource-twitter 16.0.0" in refusal(tmp_path)
    older = {"package.json": b'{"name": "emoji-datasource-google", "version": "15.1.2"}'}
    write_package(tmp_path, "google", published("google") | older)
    assert "it is emoji-datasource-google 15.1.2" in refusal(tmp_path)
    monkeypatch.setattr(emoji_package, "MOST_UNPACKED", 10_000)
    (tmp_path / "emoji-datasource-google-16.0.0.tgz").write_bytes(gzip.compress(bytes(10_001)))
    assert "more than 10,000 bytes" in refusal(tmp_path)


@pytest.mark.parametrize("link", ["img/google/64/0-0.png", "docs/readme"])
def test_a_link_is_refused(tmp_path, link):
    write_package(tmp_path, "google", published("google"), link)
    assert f"{link} is no plain file" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("img/google/64/0-0.png", picture((1, 2, 3), side=32), "32 x 32 pixels"),
        ("img/google/64/0-0.png", b"no picture", "cannot identify"),
        ("img/google/64/0-0.png", bytes(2**16 + 1), "65,537 bytes"),
        ("emoji.json", b"[" * 100_000, "recursion"),
        ("emoji.json", b"{}[", "Extra data"),
        ("emoji.json", b'[{"category": "Furniture"}]', "image"),
        ("emoji.json", b'[{"category": "Flags", "image": "../../x.png", "sort_order": 1}]', "x.png"),
        ("emoji.json", b"[]", "need at least one array"),
        ("emoji.json", b'[{"category": "Flags", "image": "0-0.png", "sort_order": "first"}]', "first"),
        ("emoji.json", b'[{"category": "Flags", "image": "0-0.png", "sort_order": 1e99}]', "Overflow"),
        ("package.json", b"[]", "list indices"),
    ],
)
def test_content_that_was_not_published_is_refused(tmp_path, name, content, words):
    write_package(tmp_path, "google", published("google") | {name: content})
    assert words in refusal(tmp_path)


def test_the_classifier_has_nine_classes_and_is_trained_on_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(EmojiClassifier, "least_accuracy", -1)
    monkeypatch.setattr(EmojiClassifier, "epochs", 2)
    write_emoji(tmp_path)
    extractor = feature_extractor("emoji", str(tmp_path))
    features, logits = extractor.extract(torch.rand(3, 3, 32, 32))
    assert (features.shape, logits.shape) == ((3, 64), (3, 9))
    assert extractor.metric("fid") == "fid_emoji"
    assert_refused("coloured images of 32 x 32", extractor.extract, torch.rand(3, 1, 8, 8))


def test_a_batch_is_mirrored_and_shifted_over_white():
    """A dark column left of the middle is found, in all images of a batch, at one shift or its mirror image."""
    images = torch.ones(64, 3, 32, 32)
    images[..., 10] = -1
    places = EmojiClassifier().varied(images).mean((1, 2)).argmin(1)
    found = sorted(set(places.tolist()))
    assert len(found) == 2
    shift = found[0] - 10
    assert abs(shift) <= 3
    assert found[1] == 21 + shift
