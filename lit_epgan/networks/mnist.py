"""TF-GAN's networks for MNIST: convolutions between dense layers, as DP-FedAvg-GAN takes them.

With the defaults these are the networks of Augenstein et al. 2020, appendix C.2: for 28 x 28 images a discriminator of
6,556,865 parameters and a generator of 13,285,217. The published ones have BatchNorm without a scale where these have a
bias; running statistics cannot be clipped and noised with the weights, as a variance under noise may turn negative.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from lit_epgan.errors import UserError
from lit_epgan.networks.sizes import check_positive

SLOPE = 0.01  # of LeakyReLU


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
        _check(image_size, channels, hidden, widths, 3)
        check_positive("an MNIST network", latent_dim=latent_dim)
        self.latent_dim, self.data_shape = latent_dim, (channels, image_size, image_size)
        small, middle, large = widths
        side = image_size // 4
        self.layers = nn.Sequential(
            nn.Linear(latent_dim, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, small * side**2),
            nn.ReLU(inplace=True),
            nn.Unflatten(1, (small, side, side)),
            nn.ConvTranspose2d(small, middle, 4, stride=2, padding=1),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(middle, large, 4, stride=2, padding=1),
            nn.ReLU(inplace=True),
            nn.ZeroPad2d((1, 2, 1, 2)),  # the side stays what it is, as even kernels cannot be centred
            nn.Conv2d(large, channels, 4),
            nn.Tanh(),
        )
        self.apply(_initialise)

    def forward(self, noise: Tensor) -> Tensor:
        """Images (n, channels, image_size, image_size) of ``noise`` (n, latent_dim)."""
        images: Tensor = self.layers(noise)
        return images


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
        _check(image_size, channels, hidden, widths, 2)
        check_positive("an MNIST network", heads=heads)
        first, second = widths
        self.layers = nn.Sequential(
            nn.Conv2d(channels, first, 4, stride=2, padding=1),
            nn.LeakyReLU(SLOPE, inplace=True),
            nn.Conv2d(first, second, 4, stride=2, padding=1),
            nn.LeakyReLU(SLOPE, inplace=True),
            nn.Flatten(),
            nn.Linear(second * (image_size // 4) ** 2, hidden),
            nn.LeakyReLU(SLOPE, inplace=True),
            nn.Linear(hidden, heads),
        )
        self.apply(_initialise)

    def forward(self, images: Tensor) -> Tensor:
        """Scores (n, heads) of ``images`` (n, channels, image_size, image_size)."""
        scores: Tensor = self.layers(images)
        return scores


def _check(image_size: int, channels: int, hidden: int, widths: Sequence[int], layers: int) -> None:
    check_positive("an MNIST network", image_size=image_size, channels=channels, hidden=hidden)
    if image_size % 4:
        raise UserError(
            f"image_size={image_size} cannot be: an MNIST network halves it twice, so give a multiple of 4."
        )
    if len(widths) != layers:
        raise UserError(f"widths={list(widths)} cannot be: an MNIST network of this kind has {layers}.")
    check_positive("an MNIST network", **{f"widths[{i}]": width for i, width in enumerate(widths)})


def _initialise(module: nn.Module) -> None:
    """Glorot's uniform weights and no biases, as TensorFlow begins."""
    if isinstance(module, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
        nn.init.xavier_uniform_(module.weight)
        assert module.bias is not None
        nn.init.zeros_(module.bias)
