"""The ``emoji`` extractor: a small classifier of the nine categories of emoji."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_epgan.emoji_package import read_emoji, split_by_emoji
from lit_epgan.metrics.image_classifier import ImageClassifier, LabelledImages, trained
from lit_epgan.networks.resnet import BasicBlock

SHIFT = 3  # pixels


class EmojiClassifier(ImageClassifier):
    """64 penultimate features and nine logits of emoji (n, 3, 32, 32).

    Of emoji that it has not seen it recognises 68 %: 93 % of the flags, 87 % of the people, half of the food and the
    objects, and 12 % of the activities, a category of all kinds of things.
    """

    name = "emoji"
    shape = (3, 32, 32)
    classes = 9
    recipe = (
        "conv 16, residual 16-32-64 at stride 2, dense 64; AdamW 2e-3 to 0, decay 1e-2, 40 epochs of 64, mirrored, "
        "shifted by up to 3, pixel noise 0.1; seed 1"
    )
    epochs = 40
    least_accuracy = 0.65

    def body(self) -> nn.Sequential:
        block = partial(BasicBlock, stride=2, norm=nn.BatchNorm2d, bias=False)
        return nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(block(16, 16), block(16, 32), block(32, 64), nn.Flatten()),
            *(nn.Linear(64 * 4 * 4, 64), nn.ReLU()),
        )

    def varied(self, images: Tensor) -> Tensor:
        """Half of the images mirrored, all shifted by one number of pixels over white, with noise."""
        mirrored = torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images.flip(3), images)
        down, right = torch.randint(2 * SHIFT + 1, (2,)).tolist()
        shifted = F.pad(mirrored, [SHIFT] * 4, value=1.0)[:, :, down : down + 32, right : right + 32]
        return super().varied(shifted)


def emoji_classifier(data_dir: str) -> EmojiClassifier:
    """The classifier trained on both vendors' emoji, from the cache or trained now (a minute).

    Args:
        data_dir: the folder that holds the packed files, as the data module's.

    Raises:
        MissingFileError: a packed file is not there.
        UserError: one is damaged, or the classifier's test accuracy is not above 65 %.
    """
    train, test = split_by_emoji(read_emoji(data_dir), split_seed=7)
    return trained(
        EmojiClassifier, LabelledImages(_scaled(train.pixels), train.categories, _scaled(test.pixels), test.categories)
    )


def _scaled(pixels: Tensor) -> Tensor:
    return pixels.to(torch.float32).div_(127.5).sub_(1)
