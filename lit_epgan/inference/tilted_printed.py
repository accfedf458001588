"""The tilted moments of EP-GAN's theorem 4.1, as printed and with its misprints corrected."""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lit_epgan.errors import UserError
from lit_epgan.inference.elementwise import in_chunks

# b of lemma 4.1 for d = 2 and 3
B2 = {"printed": math.log(math.sqrt(2) + 1), "corrected": math.log(math.sqrt(2) - 1)}
B3 = math.log(2 ** (1 / 3) - 1)


def tilted_moments_printed(
    mean: Tensor, variance: Tensor, f: Tensor, variant: str = "printed"
) -> tuple[Tensor, Tensor, Tensor]:
    """log Z, mean and variance of sigma(f theta) N(theta; mean, variance) / Z by EP-GAN's theorem 4.1.

    With C = f theta ~ N(C_m, C_s) and the approximate moments E_d = E[sigma(C)^d] of lemma 4.1,

        E_d = sigma(a (C_m + b) / sqrt(1 + pi a^2 C_s / 8))                                          (8)
              a = 2 d (1 - 2^(-1/d)),  b = ln(2^(1/d) - 1)                                          (16)
        mean' = S1 = [(C_m + C_s) E1 - C_s E2] / (E1 f)                                             (12)
        variance' = S2 - S1^2                                                                       (11)
        S2 = [(C_m + 2 C_s) E2 - 2 C_s E3] / (E1 f^2)                                      printed, (13)
        S2 = [C_s E1 + (C_m + C_s) E[C sigma] - C_s E[C sigma^2]] / (E1 f^2)         corrected, (33, 35)

    where E[C sigma] is the numerator of S1 (31) and E[C sigma^2] that of the printed S2 (37). The print also has
    b = ln(sqrt 2 + 1) for d = 2 (26). It is here to be measured, see docs/errata: use ``tilted_moments``.

    Args:
        mean: of the cavity, any shape.
        variance: of the cavity, positive; broadcasts with ``mean``.
        f: the tilt's slope, not zero; broadcasts with both.
        variant: "printed" or "corrected".

    Returns:
        log Z, mean and variance in the broadcast shape, at least in float32. The variance may be zero or negative: as
        printed it mostly is. The division by f makes small f inaccurate, and zero not a number.

    Raises:
        UserError: if ``variant`` is neither of the two.
    """
    if variant not in B2:
        raise UserError(f"tilted_moments_printed(variant={variant!r}): choose one of {', '.join(map(repr, B2))}")

    def moments(mean: Tensor, variance: Tensor, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c_m, c_s = f * mean, f**2 * variance
        e1, e2, e3 = (torch.sigmoid(_logit(c_m, c_s, d, b)) for d, b in ((1, 0.0), (2, B2[variant]), (3, B3)))
        c_sigma = (c_m + c_s) * e1 - c_s * e2
        c_sigma_2 = (c_m + 2 * c_s) * e2 - 2 * c_s * e3
        c_2_sigma = c_sigma_2 if variant == "printed" else c_s * e1 + (c_m + c_s) * c_sigma - c_s * c_sigma_2
        s1, s2 = c_sigma / (e1 * f), c_2_sigma / (e1 * f**2)
        return logsigmoid(_logit(c_m, c_s, 1, 0.0)), s1, s2 - s1**2

    log_z, s1, tilted_variance = in_chunks(moments, mean, variance, f, chunk=2**15 * torch.get_num_threads())
    return log_z, s1, tilted_variance


def _logit(c_m: Tensor, c_s: Tensor, d: int, b: float) -> Tensor:
    """Of lemma 4.1's E[sigma(C)^d]."""
    a = 2 * d * (1 - 2 ** (-1 / d))
    return a * (c_m + b) / torch.sqrt(1 + math.pi / 8 * a**2 * c_s)
