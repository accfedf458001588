"""FedAvg: local steps, then the mean of the clients' parameters, weighted by their numbers of records."""

from lit_epgan.engine.algorithm import Algorithm


class FedAvg(Algorithm):
    """theta <- theta + sum_k n_k (theta_k - theta) / sum_k n_k over the round's cohort.

    McMahan, Moore, Ramage, Hampson, Aguera y Arcas 2017, "Communication-efficient learning of deep networks from
    decentralized data", algorithm 1. (EP-GAN and FedNP print the weight as 1/n_k; see docs/errata.) Price: one
    vector up and one down, which sum.
    """
