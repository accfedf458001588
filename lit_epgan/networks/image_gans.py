"""Convolutional GANs of images: DCGANs, as in EP-GAN and ProbGAN, and TF-GAN's networks for MNIST."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from torch import Tensor, nn

from lit_epgan.lib.errors import UserError
from lit_epgan.networks.ensembles import DisjointLinear, DisjointNorm, check_blocks
from lit_epgan.networks.sizes import check_positive

ImageNorm = Literal["batch", "group", "none"]
SLOPE = 0.01  # of the MNIST networks' LeakyReLU


class DCGANGenerator(nn.Module):
    """Noise (n, latent_dim) -> images (n, channels, image_size, image_size) in (-1, 1).

    The noise becomes an image of side image_size / 2^upsamplings by one transposed convolution (ProbGAN: 4x4); each
    of the following transposed convolutions (4x4, stride 2, padding 1) doubles the side and halves the channels, down
    to ``width`` before the last. Norm and ReLU lie between them; no biases; weights N(0, 0.02^2). Several members are
    generators that share all but the first layer and its norm (EP-GAN, appendix F.3.2).

    Args:
        image_size: side in pixels: 32 with 3 or 4 upsamplings, 28 with 1 or 2.
        channels: colour channels.
        latent_dim: dimension of the noise.
        width: channels before the last layer; the first layer has width * 2^(upsamplings - 1).
        upsamplings: number of stride-2 transposed convolutions.
        norm: ``batch``, ``group`` (eight groups or fewer) or ``none``.
        members: number of generators.

    Raises:
        UserError: the image's side is not divisible by 2^upsamplings, or a number is below one.
    """

    def __init__(
        self,
        image_size: int = 32,
        channels: int = 3,
        latent_dim: int = 100,
        width: int = 128,
        upsamplings: int = 3,
        norm: ImageNorm = "batch",
        members: int = 1,
    ) -> None:
        super().__init__()
        check_positive("a DCGAN", image_size=image_size, channels=channels, latent_dim=latent_dim)
        check_positive("a DCGAN", width=width, upsamplings=upsamplings, members=members)
        if image_size % 2**upsamplings:
            raise UserError(
                f"{upsamplings} upsamplings cannot end at {image_size} pixels, which {2**upsamplings} does not divide: "
                "choose another number of upsamplings."
            )
        self.latent_dim, self.members = latent_dim, members
        self.data_shape = (channels, image_size, image_size)
        widths = [width * 2**step for step in reversed(range(upsamplings))]
        layers = [*_first(latent_dim, widths[0], image_size // 2**upsamplings, norm, members), nn.ReLU(inplace=True)]
        for inputs, outputs in pairwise(widths):
            layers += [_double(inputs, outputs), *_norm(norm, outputs), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*layers, _double(width, channels), nn.Tanh())
        self.apply(_initialise)

    def forward(self, noise: Tensor) -> Tensor:
        """Images (n, channels, image_size, image_size) of ``noise`` (n, latent_dim).

        Its rows are equal blocks, block i for member i.
        """
        check_blocks(len(noise), self.members)
        return self.layers(noise[:, :, None, None])


class DCGANDiscriminator(nn.Module):
    """Images (n, channels, image_size, image_size) -> scores (n, heads).

    Convolutions (5x5, stride 2, padding 2) halve the side and double the channels from ``width`` on; norm and
    LeakyReLU(0.2) follow each; one last convolution over what is left gives the scores. No biases; weights N(0,
    0.02^2).

    Args:
        image_size: side in pixels.
        channels: colour channels.
        width: channels after the first convolution.
        downsamplings: number of stride-2 convolutions.
        norm: ``batch``, ``group`` (eight groups or fewer) or ``none``.
        norm_first: whether the first convolution is normalised, too (EP-GAN's paper: yes; ProbGAN's code: no).
        heads: scores per image, one for each discriminator that shares the convolutions.
    """

    def __init__(
        self,
        image_size: int = 32,
        channels: int = 3,
        width: int = 128,
        downsamplings: int = 3,
        norm: ImageNorm = "batch",
        norm_first: bool = False,
        heads: int = 1,
    ) -> None:
        super().__init__()
        check_positive(
            "a DCGAN", image_size=image_size, channels=channels, width=width, downsamplings=downsamplings, heads=heads
        )
        widths = [channels, *(width * 2**step for step in range(downsamplings))]
        layers: list[nn.Module] = []
        for position, (inputs, outputs) in enumerate(pairwise(widths)):
            normalised = norm if position or norm_first else "none"
            convolution = nn.Conv2d(inputs, outputs, 5, stride=2, padding=2, bias=False)
            layers += [convolution, *_norm(normalised, outputs), nn.LeakyReLU(0.2, inplace=True)]
        left = -(-image_size // 2**downsamplings)  # an odd side is halved upwards
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[-1], heads, left, bias=False))
        self.apply(_initialise)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images).flatten(1)


def _first(inputs: int, width: int, side: int, norm: ImageNorm, members: int) -> list[nn.Module]:
    """Noise (n, inputs, 1, 1) -> (n, width, side, side) and its norm, for each of ``members`` its own."""
    if members == 1:
        return [nn.ConvTranspose2d(inputs, width, side, bias=False), *_norm(norm, width)]
    # of a single pixel the transposed convolution is a linear layer, and a batched product beats a grouped convolution
    linear = DisjointLinear([nn.Linear(inputs, width * side**2, bias=False) for _ in range(members)])
    norms = [DisjointNorm(layer, members) for layer in _norm(norm, width, members)]
    return [nn.Flatten(), linear, nn.Unflatten(1, (width, side, side)), *norms]


def _double(inputs: int, outputs: int) -> nn.ConvTranspose2d:
    return nn.ConvTranspose2d(inputs, outputs, 4, stride=2, padding=1, bias=False)


def _norm(norm: str, width: int, members: int = 1) -> list[nn.Module]:
    if norm == "batch":
        return [nn.BatchNorm2d(members * width)]
    if norm == "group":
        groups = next(groups for groups in (8, 4, 2, 1) if width % groups == 0)
        return [nn.GroupNorm(members * groups, members * width)]
    if norm == "none":
        return []
    raise UserError(f"norm {norm!r} does not exist: choose batch, group or none.")


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | DisjointLinear):
        nn.init.normal_(module.weight, std=0.02)


class MNISTGenerator(nn.Module):
    """Noise (n, latent_dim) -> images (n, channels, image_size, image_size) in (-1, 1).

    Two dense layers; the second gives an image of a quarter of the side, which transposed convolutions (4x4, stride 2)
    double twice; a convolution (4x4) and tanh end it. ReLU lies between.

    Args:
        image_size: side in pixels, a multiple of 4.
        channels: colour channels.
        latent_dim: dimension of the noise.
        hidden: width of the first dense layer.
        widths: channels of the small image, and after each transposed convolution.

    Raises:
        UserError: the side is no multiple of 4, there are not three widths, or a number is below one.
    """

    def __init__(
        self,
        image_size: int = 28,
        channels: int = 1,
        latent_dim: int = 128,
        hidden: int = 1024,
        widths: Sequence[int] = (256, 64, 32),
    ) -> None:
        super().__init__()
        _check_mnist(image_size, channels, hidden, widths, 3)
        check_positive("an MNIST network", latent_dim=latent_dim)
        self.latent_dim, self.data_shape = latent_dim, (channels, image_size, image_size)
        small, middle, large = widths
        side = image_size // 4
        self.layers = nn.Sequential(
            *(nn.Linear(latent_dim, hidden), nn.ReLU(inplace=True)),
            *(nn.Linear(hidden, small * side**2), nn.ReLU(inplace=True), nn.Unflatten(1, (small, side, side))),
            *(nn.ConvTranspose2d(small, middle, 4, stride=2, padding=1), nn.ReLU(inplace=True)),
            *(nn.ConvTranspose2d(middle, large, 4, stride=2, padding=1), nn.ReLU(inplace=True)),
            nn.ZeroPad2d((1, 2, 1, 2)),  # the side stays what it is, as even kernels cannot be centred
            *(nn.Conv2d(large, channels, 4), nn.Tanh()),
        )
        self.apply(_glorot)

    def forward(self, noise: Tensor) -> Tensor:
        return self.layers(noise)


class MNISTDiscriminator(nn.Module):
    """Images (n, channels, image_size, image_size) -> scores (n, heads).

    Two convolutions (4x4, stride 2), then a dense layer; LeakyReLU(0.01) follows each. A last dense layer gives the
    scores.

    Args:
        image_size: side in pixels, a multiple of 4.
        channels: colour channels.
        hidden: width of the dense layer.
        widths: channels after each convolution.
        heads: scores per image, one for each discriminator that shares all but the last layer.

    Raises:
        UserError: the side is no multiple of 4, there are not two widths, or a number is below one.
    """

    def __init__(
        self,
        image_size: int = 28,
        channels: int = 1,
        hidden: int = 1024,
        widths: Sequence[int] = (64, 128),
        heads: int = 1,
    ) -> None:
        super().__init__()
        _check_mnist(image_size, channels, hidden, widths, 2)
        check_positive("an MNIST network", heads=heads)
        first, second = widths
        self.layers = nn.Sequential(
            *(nn.Conv2d(channels, first, 4, stride=2, padding=1), nn.LeakyReLU(SLOPE, inplace=True)),
            *(nn.Conv2d(first, second, 4, stride=2, padding=1), nn.LeakyReLU(SLOPE, inplace=True), nn.Flatten()),
            *(nn.Linear(second * (image_size // 4) ** 2, hidden), nn.LeakyReLU(SLOPE, inplace=True)),
            nn.Linear(hidden, heads),
        )
        self.apply(_glorot)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


def _check_mnist(image_size: int, channels: int, hidden: int, widths: Sequence[int], layers: int) -> None:
    check_positive("an MNIST network", image_size=image_size, channels=channels, hidden=hidden)
    if image_size % 4:
        raise UserError(
            f"image_size={image_size} cannot be: an MNIST network halves it twice, so give a multiple of 4."
        )
    if len(widths) != layers:
        raise UserError(f"widths={list(widths)} cannot be: an MNIST network of this kind has {layers}.")
    check_positive("an MNIST network", **{f"widths[{i}]": width for i, width in enumerate(widths)})


def _glorot(module: nn.Module) -> None:
    """Glorot's uniform weights and no biases, as TensorFlow begins."""
    if isinstance(module, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
        nn.init.xavier_uniform_(module.weight)
        assert module.bias is not None
        nn.init.zeros_(module.bias)
