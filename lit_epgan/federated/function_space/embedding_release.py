"""What embedding algorithms share: the features of a federation, each client's one release, the herding of the sum."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_epgan.bayes import (
    EmbeddingFactor,
    LowFrequencies,
    NormalisedMoments,
    Points,
    RandomFourierFeatures,
    StackedFrames,
    feature_map,
    herd,
    median_distance,
)
from lit_epgan.bayes.factor import SENSITIVITY, clipped
from lit_epgan.bayes.feature_maps import FlatFeatures
from lit_epgan.engine import Broadcast, Client, Message, Server, merged, scalar
from lit_epgan.federated.tilted_batch import check_sample
from lit_epgan.lib.bounds import above, at_least, one_of
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for
from lit_epgan.networks.average import frozen_copy
from lit_epgan.networks.modes import evaluating
from lit_epgan.privacy import GaussianMechanism, Guarantee

CODES, NETWORK, VERSION = "embedding.codes", "embedding.network", "embedding.version"
TOTAL, OWN = "embedding", "embedding"
Unit = Literal["record", "user"]


class Release(Message):
    """A client's release as it is sent: of single records their count and sums (1 + D,), of a user the embedding (D,)
    and 1."""

    embedding: Tensor | None = merged("sum", default=None)
    members: float | None = merged("records", default=None)


class RecordUnit:
    """(n_k, sum_i phi(x_i)) of a client's n_k records, with noise of the client's own, which ``mechanism`` adds."""

    def __init__(self, mechanism: GaussianMechanism) -> None:
        self.mechanism = mechanism

    def of(self, client: Client, factor: Callable[[], EmbeddingFactor]) -> Tensor:
        """The release (1 + D,) of the client's factor: noised once; whoever asks again gets the same numbers."""
        if OWN not in client.released:
            self.mechanism.pay(client.name)
            client.released[OWN] = factor().released(self.mechanism, client.seed, client.index).statistics
        return client.released[OWN]

    def report(self, released: Tensor) -> Release:
        """What is sent of a release (1 + D,): all of it."""
        return Release(embedding=released)

    def sum_of(self, releases: Release) -> Tensor:
        """The sum (1 + D,) of the clients' releases."""
        assert releases.embedding is not None
        return releases.embedding

    def weight(self, client: Client) -> float:
        """What the client counts in the sum: n_k."""
        return client.records


class UserUnit:
    """(1, mu_k min(1, 1 / ||mu_k||)) of a client that is one user, mu_k = 1/n_k sum_i phi(x_i), exactly.

    The user moves the sum of mu_k by 1 at most. The noise is that of the federation's mechanism, as ``CentralNoise`` at
    a bound of 1; the divisor is the number of users who were asked, which is public.
    """

    def of(self, client: Client, factor: Callable[[], EmbeddingFactor]) -> Tensor:
        """The release (1 + D,) of the client's factor. Being exact, it is not kept."""
        mean = clipped(factor().mean)
        return torch.cat([mean.new_ones(1), mean])

    def report(self, released: Tensor) -> Release:
        """What is sent of a release (1 + D,): the embedding (D,), and that it is one user's."""
        return Release(embedding=released[1:], members=1.0)

    def sum_of(self, releases: Release) -> Tensor:
        """The sum (1 + D,) of the clients' releases."""
        embedding, members = releases.embedding, releases.members
        assert embedding is not None
        return torch.cat([members.to(embedding), embedding])  # type: ignore[union-attr]

    def weight(self, client: Client) -> float:
        """What the client counts in the sum: 1."""
        return 1.0


def unit_of(unit: Unit, mechanism: GaussianMechanism) -> RecordUnit | UserUnit:
    """The unit of that name. UserError: there is none, or a user is to be protected by the noise that a client adds for
    single records."""
    if unit == "record":
        return RecordUnit(mechanism)
    if unit != "user":
        raise UserError(f"unit is {unit!r}; a release protects a record or a user")
    if mechanism.noise_multiplier:
        raise UserError(
            f"noise_multiplier {mechanism.noise_multiplier:g} is noise that each client adds for its single records; "
            "for users leave it out and give the federation a mechanism: CentralNoise(bound=1.0, noise_multiplier=...)"
        )
    return UserUnit()


class SharedFeatures(nn.Module):
    """x (n, ...) -> the output of a submodule for x, by a copy of the network that it is part of.

    Everybody has the server's model, so what it looks at is public; later rounds do not change the copy.

    Args:
        module: the model.
        name: dotted name of the submodule, as in ``discriminator.layers.3``.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self._caught: Tensor | None = None
        network, _, rest = name.partition(".")
        self.network = frozen_copy(module.get_submodule(network))
        self.network.get_submodule(rest).register_forward_hook(self._catch)

    def forward(self, x: Tensor) -> Tensor:
        """The submodule's output for records (n, ...)."""
        self.network(x)
        caught, self._caught = self._caught, None
        assert caught is not None, "the network does not pass through its own submodule"
        return caught

    @property
    def vector(self) -> Tensor:
        """All floating-point tensors of the copy, one after another."""
        return torch.cat([tensor.flatten() for tensor in self._tensors()])

    @torch.no_grad()
    def load(self, vector: Tensor) -> None:
        """Take up what another copy's ``vector`` said."""
        tensors = self._tensors()
        for tensor, part in zip(tensors, vector.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def _tensors(self) -> list[Tensor]:
        return [tensor for tensor in self.network.state_dict().values() if tensor.is_floating_point()]

    def _catch(self, module: nn.Module, arguments: tuple, output: Any) -> None:
        self._caught = output


class InDouble(nn.Module):
    """The same numbers in double precision."""

    def forward(self, x: Tensor) -> Tensor:
        """``x`` in float64."""
        return x.double()


class EmbeddingRelease:
    """Each client's sum of random features or moments, or their mean, released once; points herded to the clients' sum.

    What the features depend on is public (the data's shape and range, and the federation's seed): the bandwidths are
    measured on the random points that the herding starts from, so a client releases one vector in one message. A record
    is a row that the client's loader gives in one pass: one that gives a row twice releases it twice.

    Args:
        features: what the kernel looks at: ``identity``, ``random_convolutions``, ``lite0``, ``inception``, ``digits``,
            a network, or the name of a submodule of the federation's own model, as ``discriminator.layers.3``, which
            is taken as it is when the features are built. By default random convolutions for images and the identity
            for anything else.
        frequencies: of the random Fourier features, 2,048 by default; a release is one more than twice as many numbers.
            (Of moments it is one more than twice the features.)
        bandwidths: of their kernel, in median distances between random points; by default .5 and 1 for images, .1, .2,
            .4 and .8 for anything else.
        dimensions: of each channel of an image, the lowest frequencies that herded points have; by default 9 / 16,
            64 at most.
        stacked: frames that each row of a record shows side by side, where records are chunks of a spectrogram.
        bound: of a coordinate's absolute value, known without the data; by default 1 for images, 3 for chunks and 5
            for anything else.
        points: number of herded points.
        herding_steps: of Adam on all points.
        herding_rate: first length of such a step, in the points' own scale.
        smoothing: noise that the points are moved by while they are herded, in their own scale.
        noise_multiplier: z, the noise of a release in units of its sensitivity; 0 is no privacy.
        delta: of the release's (epsilon, delta).
        noise_seed: makes the noise repeatable, for studies only; by default it comes from the operating system.
        ledger, budget: of the release, as for ``lit_epgan.privacy.GaussianMechanism``.
        unit: what a release protects: a ``record``, by ``noise_multiplier``, or a ``user``, by the federation's
            mechanism (``UserUnit``).
        embedding: of what the features see: ``fourier``, random Fourier features of it, whose means tell any two
            distributions apart; or ``moments``, its normalised first and second moments (DP-MEPF), where the features
            are a network that was trained on public data.
    """

    def __init__(
        self,
        features: str | nn.Module | None = None,
        frequencies: int | None = None,
        bandwidths: Sequence[float] | None = None,
        dimensions: int | None = None,
        stacked: int | None = None,
        bound: float | None = None,
        points: int = 600,
        herding_steps: int = 300,
        herding_rate: float = 1.0,
        smoothing: float = 1.0,
        noise_multiplier: float = 0.0,
        delta: float = 1e-5,
        noise_seed: int | None = None,
        ledger: str | None = None,
        budget: float | None = None,
        unit: Unit = "record",
        embedding: Literal["fourier", "moments"] = "fourier",
    ) -> None:
        one_of(("fourier", "moments"), self, embedding=embedding)
        if embedding == "moments" and (bandwidths is not None or frequencies is not None):
            raise UserError(
                "bandwidths and frequencies are a kernel's, and an embedding of moments has none: leave them out"
            )
        frequencies = 2048 if frequencies is None else frequencies
        at_least(1, self, frequencies=frequencies, points=points, herding_steps=herding_steps)
        above(0, self, herding_rate=herding_rate)
        at_least(0, self, smoothing=smoothing)
        self.features, self.embedding = features, embedding
        self.frequencies, self.bandwidths = frequencies, bandwidths
        self.dimensions, self.stacked, self.bound = dimensions, stacked, bound
        self.points, self.herding_steps = points, herding_steps
        self.herding_rate, self.smoothing = herding_rate, smoothing
        self.mechanism = GaussianMechanism(noise_multiplier, delta, noise_seed, ledger, budget)
        self.unit = unit_of(unit, self.mechanism)
        self._network: Tensor | None = None

    @property
    def guarantee(self) -> Guarantee | None:
        """What a client's release guarantees; None without noise."""
        return self.mechanism.guarantee(SENSITIVITY)

    def build(self, module: nn.Module, seed: int, network: Tensor | None = None) -> None:
        """Make the features and the code for the module's data; everybody makes the same. ``network`` is that of a
        submodule that is taken as features, as ``network`` gave it; by default as it is now. UserError: the module
        cannot be sampled, or the features do not suit its samples."""
        check_sample(module, "the mean embedding")
        shape = sample_shape(module)
        image = len(shape) == 3 or self.stacked is not None
        code, self._seed = self._code(shape), seed
        h = self._feature_map(module, shape, network)
        # herding needs single precision, whatever the module is trained in
        parameter = next(p for p in module.parameters() if p.is_floating_point())
        self._like = parameter.new_empty(0, dtype=torch.promote_types(parameter.dtype, torch.float32))
        self.code, h = code.to(self._like), h.to(self._like)
        start = self._start()
        self._refuse_opaque(h, start[:2])
        with torch.no_grad():
            seen = h(self.code(start))
        phi = NormalisedMoments() if self.embedding == "moments" else self._fourier(seen, image)
        # what a client releases is summed up in double precision, so that rounding does not add to the sensitivity
        self._released_phi = nn.Sequential(h, InDouble(), copy.deepcopy(phi))
        self.phi = nn.Sequential(h, phi.to(self._like))

    def start(self, server: Server) -> None:
        """A resumed server's features are those that it had."""
        if self._network is None:
            return
        if NETWORK in server.state:
            self.build(server.module, server.seed, server.state[NETWORK])
        server.state[NETWORK] = self._network

    def rebuild(self, server: Server) -> None:
        """The features as the server's model is now."""
        self.build(server.module, server.seed)
        if self._network is not None:
            server.state[NETWORK] = self._network

    def broadcast(self, server: Server) -> Broadcast:
        """What clients must know: the network that features are taken from, the total and the points."""
        return {name: server.state[name] for name in (NETWORK, TOTAL, CODES, VERSION) if name in server.state}

    def kept(self, server: Server) -> dict[str, int]:
        """Their versions: each is sent to a client once."""
        version = int(server.state.get(VERSION, scalar(0)))
        return {TOTAL: version, CODES: version, NETWORK: int(TOTAL in server.state)}

    def take(self, client: Client, received: Broadcast) -> None:
        """A client's features are the server's."""
        network = received.get(NETWORK)
        if network is not None and network is not self._network:
            self.build(client.module, client.seed, network)
            self._network = network

    @torch.no_grad()
    def of(self, client: Client) -> Tensor:
        """The client's release (1 + D,)."""
        phi = self._released_phi.to(self._like.device)
        return self.unit.of(client, lambda: EmbeddingFactor.of(client.data(), phi, self._like))

    def report(self, client: Client) -> Release:
        """The client's release as it is sent."""
        return self.unit.report(self.of(client))

    def add(self, server: Server, releases: Release) -> None:
        """Take the clients' releases into the server's total, and herd points to it, from where they are."""
        released = self.unit.sum_of(releases)
        server.state[TOTAL] = released + server.state.get(TOTAL, 0)
        server.state[VERSION] = server.state.get(VERSION, scalar(0)) + 1
        start = server.state[CODES] if CODES in server.state else self._start()
        server.state[CODES] = herd(
            self.phi,
            self.total(server.state).mean.to(self._like),
            self.code,
            start,
            self.herding_steps,
            self.herding_rate,
            self.smoothing,
            generator_for(server.seed, server.round, "herding"),
        )

    def total(self, tensors: Broadcast) -> EmbeddingFactor:
        """The product of all released factors, in float64, from the server's state or what a client has received."""
        return EmbeddingFactor(tensors[TOTAL])

    def squared_discrepancy(self, server: Server, x: Tensor) -> Tensor:
        """|| mean phi(x) - mu ||^2 of points x (n, *data_shape) and the total's mean embedding mu."""
        return (self.phi(x.to(self._like)).mean(0) - self.total(server.state).mean.to(self._like)).square().sum()

    @torch.no_grad()
    def herded(self, tensors: Broadcast) -> Tensor:
        """The herded points (points, *data_shape), from the server's state or what a client has received."""
        return self.code(tensors[CODES].to(self._like))

    def samples(self, server: Server, n: int, start: int = 0) -> dict[str, Tensor]:
        """``herded``: n of the points; once all are drawn, they are drawn again."""
        if CODES not in server.state:
            return {}
        generator = generator_for(server.seed, "herded")
        orders = [torch.randperm(self.points, generator=generator) for _ in range(-(-(start + n) // self.points))]
        points = self.herded(server.state)
        return {"herded": points[torch.cat(orders)[start : start + n].to(points.device)]}

    def _code(self, shape: torch.Size) -> LowFrequencies | Points | StackedFrames:
        if self.stacked is not None:
            return StackedFrames(shape, self.stacked, self.dimensions, 3.0 if self.bound is None else self.bound)
        if len(shape) == 3:
            return LowFrequencies(shape, self.dimensions, 1.0 if self.bound is None else self.bound)
        if self.dimensions is not None:
            raise UserError(
                f"dimensions are an image's frequencies, but a record has the shape {tuple(shape)}: leave it out"
            )
        return Points(shape, 5.0 if self.bound is None else self.bound)

    def _feature_map(self, module: nn.Module, shape: torch.Size, network: Tensor | None) -> FlatFeatures:
        self._network = None
        if not isinstance(self.features, str) or self.features not in dict(module.named_modules()):
            return feature_map(self.features, shape, generator_for(self._seed, "features"))
        shared = SharedFeatures(module, self.features)
        if network is not None:
            shared.load(network)
        self._network = shared.vector
        return FlatFeatures(shared)

    def _fourier(self, seen: Tensor, image: bool) -> RandomFourierFeatures:
        """Random features with bandwidths in the median distance of what is seen (n, d) of random points."""
        relative = self.bandwidths if self.bandwidths is not None else (0.5, 1.0) if image else (0.1, 0.2, 0.4, 0.8)
        unit, frequencies = median_distance(seen), generator_for(self._seed, "frequencies")
        return RandomFourierFeatures(seen.shape[1], self.frequencies, [unit * b for b in relative], frequencies)

    def _start(self) -> Tensor:
        return self.code.start(self.points, generator_for(self._seed, "herding start"))

    @torch.enable_grad()
    def _refuse_opaque(self, h: nn.Module, codes: Tensor) -> None:
        codes = codes.detach().requires_grad_()
        seen = h(self.code(codes))
        gradient = torch.autograd.grad(seen.sum(), codes)[0] if seen.requires_grad else codes.new_zeros(1)
        if not bool(gradient.any()):
            raise UserError(
                f"no gradient passes through the features {self.features!r}, so no points can be herded by them: give "
                "a differentiable network"
            )


@torch.no_grad()
def sample_shape(module: nn.Module) -> torch.Size:
    """Shape of one sample of ``module.sample(n, generator)``; the module's buffers stay as they are.

    Sampling may make BatchNorm statistics anew, and a resumed run, which asks once more, must not differ by them.
    """
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with evaluating(module):  # BatchNorm takes no single sample in training
        shape: torch.Size = module.sample(1, generator_for("shape")).shape[1:]  # type: ignore[operator]
    for name, buffer in module.named_buffers():
        buffer.copy_(before[name])
    return shape
