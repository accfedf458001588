"""One of the orders in which a symmetric model's parameters mean the same, chosen by the parameters alone."""

from torch import Tensor


def ordered(theta: Tensor, symmetries: Tensor, by: int) -> Tensor:
    """theta (n, p), each row in the order in which coordinate ``by`` and its likes in other components ascend.

    The likes are the places c_1 < ... < c_K to which the symmetries take ``by``. Of all orders of a row, the one with
    the greatest sum_k k theta_{c_k} is taken: by the rearrangement inequality theta_{c_k} then ascends. So rows of any
    origin can be compared, and a posterior with K! equal modes is left with one of them.

    Args:
        theta: (n, p).
        symmetries: (S, p), as ``Simulator.symmetries``.
        by: a coordinate that tells components apart, such as the first of a component's mean.
    """
    if len(symmetries) == 1:
        return theta
    likes = symmetries[:, by].unique()
    ranks = theta.new_tensor(range(len(likes)))
    best = (theta[:, symmetries[:, likes]] @ ranks).argmax(1)
    return theta.gather(1, symmetries[best])
