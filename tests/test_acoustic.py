"""The acoustic model: its loss and accuracy by hand, its network, what it refuses."""

import math
from collections import Counter

import kaldi_hmm_gmm
import kaldifst
import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.modules.acoustic_model import AcousticModel, accuracy, check_states, cross_entropy
from lit_epgan.networks.speech_networks import SRUAcousticNetwork
from lit_epgan.speech.decoding import Decoder, decoding_graph, grammar, log_prior
from lit_epgan.speech.gmm import (
    AlignedClient,
    Mixtures,
    aligned,
    flat_start,
    split,
    split_targets,
    train_mixtures,
    training_graphs,
)
from lit_epgan.speech.packages import speech_package
from lit_epgan.speech.phones import PDFS, SELF_LOOP_SCALE, UNKNOWN_WORD, lexicon, phone_models
from tests.federations import fit
from tests.refusals import assert_refused


def test_loss_and_accuracy_by_hand_and_what_is_refused():
    """Frames of probabilities (3/4, 1/4), (1/2, 1/2) and one without a state: loss = (ln 4/3 + ln 2) / 2."""
    scores = torch.tensor([[[math.log(3), 0.0], [0.0, 0.0], [9.0, 0.0]]])
    states = torch.tensor([[0, 1, -100]])
    torch.testing.assert_close(cross_entropy(scores, states), torch.tensor((math.log(4 / 3) + math.log(2)) / 2))
    assert accuracy(scores, states) == 50  # argmax of a tie is the first
    assert_refused("lr", AcousticModel, SRUAcousticNetwork(), lr=0)
    assert_refused("hidden", SRUAcousticNetwork, hidden=0)
    assert_refused("set its pdfs to 123", check_states, 123, 100)


def test_log_posteriors_and_the_networks_layers():
    model = AcousticModel(SRUAcousticNetwork(inputs=5, hidden=8, layers=2, projection=7, pdfs=3))
    posteriors = model(torch.randn(2, 6, 5))
    torch.testing.assert_close(posteriors.exp().sum(-1), torch.ones(2, 6))
    shapes = {name: tuple(p.shape) for name, p in model.network.named_parameters()}
    assert shapes["first.weight"] == (8, 5)
    assert shapes["recurrent.layers.1.weight.weight"] == (24, 8)
    assert shapes["last.0.weight"] == (7, 8)
    assert shapes["last.2.weight"] == (3, 7)
    # Appendix D.4 of FedNP: dense 200-1280, twelve layers of 1280 with three products each, dense 1280-1024.
    network = SRUAcousticNetwork(inputs=200, hidden=1280, layers=12, projection=1024, pdfs=123)
    scores = network(torch.randn(1, 3, 200))
    assert scores.shape == (1, 3, 123)
    assert scores.isfinite().all()
    layer = 3 * 1280**2 + 4 * 1280
    ends = 201 * 1280 + 1281 * 1024 + 1025 * 123
    assert sum(p.numel() for p in network.parameters()) == 12 * layer + ends


def test_it_learns_in_a_federation(tmp_path):
    x = torch.randn(64, 4, 5, dtype=torch.float64)
    states = (x[:, :, 0] > 0).long()
    sets = [torch.utils.data.TensorDataset(x[i::2], states[i::2]) for i in range(2)]
    data = FederatedDataModule.from_datasets(sets, batch_size=16, local_epochs=5)
    model = AcousticModel(SRUAcousticNetwork(5, 16, 1, 16, 2, dropout=0.0), lr=1e-2, lr_decay=0.5)
    fit(model, data, rounds=6)
    with torch.no_grad():
        assert accuracy(model(x), states) > 90


TEXTS = ["turn it on", "turn it off", "two cats turn", "blorf it on", "to turn it on", "to turn it off"]


@pytest.fixture(scope="module")
def decoder():
    words, phones = lexicon({word for text in TEXTS for word in text.split()}), phone_models()
    return Decoder(decoding_graph(words, phones, TEXTS), phones, words, np.full(PDFS, -np.log(PDFS)))


def posteriors(decoder, text, frames=80, sure=0.99):
    """log p(state | frame) (frames, states) that is ``sure`` of a path of ``text``."""
    (graph,) = training_graphs(decoder.lexicon, decoder.phones, [text])
    rng = np.random.default_rng(0)
    anything = decoder.phones.decodable(rng.normal(size=(frames, PDFS)).astype(np.float32))
    path = aligned(graph, anything, decoder.phones, beam=1000.0)
    scores = np.full((frames, PDFS), np.log((1 - sure) / PDFS))
    scores[np.arange(frames), decoder.phones.pdfs[np.array(path) - 1]] = np.log(sure)
    return scores


def test_known_states_become_their_words_homophones_by_the_grammar(decoder):
    for text in TEXTS:
        assert decoder.words(posteriors(decoder, text), scale=1.0) == " ".join(decoder.lexicon.known(text))
    assert decoder.lexicon.known("blorf it on") == [UNKNOWN_WORD, "it", "on"]
    # ``two`` sounds like ``to``, which alone stands before ``turn`` in the grammar's text.
    assert decoder.words(posteriors(decoder, "two turn it on"), scale=1.0) == "to turn it on"


def test_the_prior_of_aligned_states_scales_their_likelihoods(decoder, monkeypatch):
    prior = np.exp(log_prior([np.array([0, 0, 1]), np.array([1, 1])], 3))
    np.testing.assert_allclose(prior, np.array([3, 4, 1]) / 8)
    # Bayes' rule: scale (log p(s | x) - log p(s)) is what the search reads.
    seen = []
    monkeypatch.setattr(type(decoder.phones), "decodable", lambda self, scores: seen.append(scores))
    monkeypatch.setattr(Decoder, "_best", lambda self, decodable: "")
    prior = np.log(np.linspace(1, 2, PDFS))
    Decoder(decoder.graph, decoder.phones, decoder.lexicon, prior).words(np.full((2, PDFS), -1.0), scale=0.5)
    np.testing.assert_allclose(seen[0], np.tile(0.5 * (-1 - prior), (2, 1)), rtol=1e-6)


DIMENSION, FRAMES = 3, 120


@pytest.fixture(scope="module")
def phones():
    return phone_models()


@pytest.fixture
def clients(phones):
    rng = np.random.default_rng(0)
    transitions = [int(np.flatnonzero(phones.pdfs == pdf)[0]) + 1 for pdf in (0, 1)]
    utterances = [[rng.normal(k, 1 + k, size=(FRAMES, DIMENSION)).astype(np.float32)] for k in range(2)]
    return [(own, [[transitions[i % 2] for i in range(FRAMES)]]) for own in utterances]


def fresh():
    return Mixtures(np.zeros(DIMENSION), np.ones(DIMENSION))


def test_clients_statistics_add_up_to_those_of_all_audio(clients, phones):
    mixtures = fresh()
    one, other = (mixtures.statistics(*own, phones) for own in clients)
    together = mixtures.statistics(*(a + b for a, b in zip(*clients, strict=True)), phones)
    for name in together.__dataclass_fields__:
        np.testing.assert_allclose(getattr(one + other, name), getattr(together, name))
    assert together.frames == 2 * FRAMES
    nothing = fresh().statistics([np.ones((5, DIMENSION), np.float32)], [[]], phones)
    assert nothing.frames == 0
    assert nothing.occupancy.sum() == 0


def test_one_gaussian_learns_mean_and_variance_and_their_likelihood(clients, phones):
    mixtures = fresh()
    total = mixtures.statistics(*clients[0], phones) + mixtures.statistics(*clients[1], phones)
    mixtures.learn(total)
    frames = np.concatenate([own[0][0][::2] for own in clients])  # those of pdf 0
    learnt = mixtures.model.get_pdf(0)
    np.testing.assert_allclose(learnt.means[0], frames.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(1 / learnt.inv_vars[0], frames.var(0), rtol=1e-3)
    again = mixtures.statistics(*clients[0], phones)
    expected = 0.0
    for pdf in range(2):
        x = np.concatenate([own[0][0][pdf::2] for own in clients])
        expected += multivariate_normal(x.mean(0), np.diag(x.var(0))).logpdf(clients[0][0][0][pdf::2]).sum()
    assert again.log_likelihood == pytest.approx(expected, rel=1e-4)


def test_every_iteration_is_likelier_and_more_gaussians_are_likelier_still(clients, phones):
    mixtures, likelihoods = fresh(), []
    for gaussians in (None, PDFS + 2, *[None] * 20):
        total = mixtures.statistics(*clients[0], phones) + mixtures.statistics(*clients[1], phones)
        likelihoods.append(total.log_likelihood)
        mixtures.learn(total, gaussians)
    assert mixtures.gaussians == PDFS + 2
    assert np.all(np.diff(likelihoods[2:]) > -1e-3)
    assert likelihoods[-1] > likelihoods[1] + 1


def test_mixtures_are_what_their_state_says_and_start_flat(clients, phones, utterances):
    mixtures = fresh()
    mixtures.learn(mixtures.statistics(*clients[0], phones), PDFS + 2)
    state = mixtures.state()
    restored = Mixtures.from_state(state)
    for name, tensor in restored.state().items():
        assert torch.equal(tensor, state[name])
    mixtures = flat_start(aligned_clients(utterances, phone_models(), APART))
    frames = np.concatenate(utterances)
    for pdf in (0, PDFS - 1):
        gaussian = mixtures.model.get_pdf(pdf)
        np.testing.assert_allclose(gaussian.means[0], frames.mean(0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(1 / gaussian.inv_vars[0], frames.var(0), rtol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_kaldis_aligner_finds_the_best_of_all_paths(seed):
    """The graph of "two" (T UW, silence before and after at will), ten frames: every path is enumerated."""
    phones = phone_models()
    (graph,) = training_graphs(lexicon(["two"]), phones, ["two"])
    rng = np.random.default_rng(seed)
    phones.learn(rng.uniform(1, 50, size=phones.transitions.num_transition_ids + 1))
    scores = rng.normal(scale=0.2, size=(10, PDFS)).astype(np.float32)  # no louder than the transitions
    weighted = graph.copy()
    kaldi_hmm_gmm.add_transition_probs(
        trans_model=phones.transitions,
        disambig_syms=[],
        transition_scale=1.0,
        self_loop_scale=SELF_LOOP_SCALE,
        fst=weighted,
    )

    def paths(state, frame, cost, taken):
        if frame == len(scores) and weighted.final(state).value < float("inf"):
            yield cost + weighted.final(state).value, taken
        for arc in kaldifst.ArcIterator(weighted, state):
            if arc.ilabel == 0:
                yield from paths(arc.nextstate, frame, cost + arc.weight.value, taken)
            elif frame < len(scores):
                acoustic = scores[frame, phones.pdfs[arc.ilabel - 1]]
                yield from paths(arc.nextstate, frame + 1, cost + arc.weight.value - acoustic, [*taken, arc.ilabel])

    every = sorted(paths(weighted.start, 0, 0.0, []))
    assert len(every) > 100
    assert every[1][0] - every[0][0] > 1e-4
    assert aligned(graph, phones.decodable(scores), phones, beam=1000.0) == every[0][1]


@pytest.mark.parametrize("wanted", [PDFS, PDFS + 40, 3 * PDFS, 10**6])
def test_mixtures_grow_as_kaldis_do(wanted):
    occupancy = np.random.default_rng(0).gamma(0.5, 800.0, PDFS).astype(np.float32)
    kaldis = Mixtures(np.zeros(2), np.ones(2)).model
    kaldis.split_by_count(occupancy, min(wanted, 4000), 0.01, 0.2, 20.0)
    expected = [kaldis.get_pdf(j).num_gauss for j in range(PDFS)]
    assert split_targets(occupancy.tolist(), min(wanted, 4000)) == expected


def test_the_heaviest_gaussian_is_halved():
    model = Mixtures(np.array([1.0, -2.0]), np.array([4.0, 0.25])).model
    mixture = model.get_pdf(0)
    rng = np.random.default_rng(0)
    first, second = rng.standard_normal(2), rng.standard_normal(2)
    split(mixture, 3, np.random.default_rng(0))
    scale = 0.01 * np.array([2.0, 0.5])
    low, high = np.array([1.0, -2.0]) - scale * first, np.array([1.0, -2.0]) + scale * first
    np.testing.assert_allclose(mixture.weights, [0.25, 0.5, 0.25])
    np.testing.assert_allclose(mixture.means, [low - scale * second, high, low + scale * second], rtol=1e-5)
    np.testing.assert_allclose(1 / np.array(mixture.inv_vars), [[4.0, 0.25]] * 3, rtol=1e-6)
    assert model.num_gauss == PDFS + 2
    other = Mixtures(np.array([1.0, -2.0]), np.array([4.0, 0.25])).model
    split(other.get_pdf(0), 3, np.random.default_rng(0))
    assert np.array_equal(other.get_pdf(0).means, mixture.means)


ALIGNED = ["one two", "three", "two one three", "three two", "one", "one three two"]


@pytest.fixture
def utterances():
    rng = np.random.default_rng(0)
    means = dict(zip(("one", "two", "three"), 3 * rng.normal(size=(3, 39)), strict=True))
    spoken = [[rng.normal(means[word], 1 + k / 3, size=(40, 39)) for word in text.split()]
              for k, text in enumerate(ALIGNED)]  # fmt: skip
    return [np.concatenate(words).astype(np.float32) for words in spoken]


def aligned_clients(utterances, phones, shares):
    graphs = training_graphs(lexicon({"one", "two", "three"}), phones, ALIGNED)
    return [AlignedClient(utterances[own], graphs[own]) for own in shares]


APART, TOGETHER = [slice(0, 1), slice(1, 4), slice(4, 6)], [slice(0, 6)]


def test_three_clients_learn_the_mixtures_of_one(utterances, monkeypatch):
    """Nothing but sums leaves a client, and yet alignments, mixtures and transition probabilities are the same.

    Were it not for what the first alignment draws, optional silences: its seeds are a client's own, here all alike.
    """
    kaldifst = speech_package("kaldifst")
    equally = kaldifst.equal_align
    monkeypatch.setattr(kaldifst, "equal_align", lambda graph, n, seed, tries: equally(graph, n, n, tries))
    learnt = []
    for shares in (APART, TOGETHER):
        phones = phone_models()
        parties = aligned_clients(utterances, phones, shares)
        mixtures = train_mixtures(parties, phones, iterations=10, gaussians=PDFS + 10)
        learnt.append((mixtures.state(), phones.counts, [path for each in parties for path in each.alignments]))
    (apart, counts, paths), (together, all_counts, all_paths) = learnt
    assert paths == all_paths
    assert len({state for path in paths for state in path}) > 10
    np.testing.assert_allclose(counts, all_counts)
    assert apart.keys() == together.keys()
    for name, tensor in apart.items():
        torch.testing.assert_close(tensor, together[name], rtol=1e-3, atol=1e-4)


ORDER = 3

SENTENCES = [
    *("turn it on", "turn it off", "two cats turn", "to turn it on", "to turn it off", "turn two cats on"),
    *("it turn on", "two cats on it", "cats on it turn", "turn it on it", "two turn to two", "off it to it"),
]


class KneserNey:
    """Back-off Kneser-Ney smoothing (Kneser and Ney 1995), one discount an order, unigrams without.

    p(w | h) = (c(h w) - D) / c(h) of n-grams that were seen, else b(h) p(w | h'), where h' lacks the first word of h,
    D = n1 / (n1 + 2 n2) of the n-grams seen once and twice, and c counts for orders below the highest the different
    words before (an n-gram that begins a sentence has none, and is counted as it is).
    """

    def __init__(self, texts):
        self.raw = [Counter() for _ in range(ORDER)]
        for text in texts:
            words = ("<s>", *text.split(), "</s>")
            for n in range(ORDER):
                self.raw[n].update(words[i : i + n + 1] for i in range(len(words) - n))
        del self.raw[0][("<s>",)]
        self.count = [Counter() for _ in range(ORDER - 1)] + [self.raw[-1]]
        for n in range(ORDER - 1):
            before = Counter(longer[1:] for longer in self.raw[n + 1])
            self.count[n] = Counter({gram: before[gram] or c for gram, c in self.raw[n].items()})
        self.discount = [0.0]
        for counts in self.raw[1:]:
            once, twice = (sum(c == k for c in counts.values()) for k in (1, 2))
            self.discount.append(once / (once + 2 * twice))

    def seen(self, history):
        n = len(history)
        after = {gram[-1]: c for gram, c in self.count[n].items() if gram[:-1] == history}
        total = sum(after.values())
        return {word: (c - self.discount[n]) / total for word, c in after.items()}

    def p(self, word, history):
        seen = self.seen(history)
        if word in seen:
            return seen[word]
        lower = history[1:]
        if not seen:
            return self.p(word, lower)
        left = (1 - sum(seen.values())) / (1 - sum(self.p(w, lower) for w in seen))
        return left * self.p(word, lower)


@pytest.fixture(scope="module")
def model():
    return KneserNey(SENTENCES)


@pytest.fixture(scope="module")
def costs():
    """The cost of a sentence in the grammar: each word's arc where there is one, else the arc that backs off."""
    kaldifst = pytest.importorskip("kaldifst")
    words = lexicon({word for text in SENTENCES for word in text.split()})
    fst = grammar(words, SENTENCES)
    back_off = words.words["#0"]

    def arcs(state):
        return {arc.ilabel: arc for arc in kaldifst.ArcIterator(fst, state)}

    def cost(text):
        state, total = fst.start, 0.0
        for label in [words.words[word] for word in text.split()]:
            while label not in arcs(state):
                total, state = total + arcs(state)[back_off].weight.value, arcs(state)[back_off].nextstate
            total, state = total + arcs(state)[label].weight.value, arcs(state)[label].nextstate
        while not np.isfinite(fst.final(state).value):
            total, state = total + arcs(state)[back_off].weight.value, arcs(state)[back_off].nextstate
        return total + fst.final(state).value

    return cost


def test_the_oracle_is_a_distribution(model):
    words = {gram[0] for gram in model.raw[0]}
    for history in [(), ("turn",), ("<s>",), ("<s>", "turn"), ("turn", "it"), ("on", "cats")]:
        assert sum(model.p(word, history) for word in words) == pytest.approx(1)


@pytest.mark.parametrize("text", [*SENTENCES, "two cats", "cats turn it to", "on on on", "to it two off cats"])
def test_sentences_cost_what_kneser_ney_says(model, costs, text):
    """Seen ones, and such as back off once or twice."""
    history, expected = ("<s>",), 0.0
    for word in (*text.split(), "</s>"):
        expected -= np.log(model.p(word, history))
        history = (*history, word)[-ORDER + 1 :]
    assert costs(text) == pytest.approx(expected, abs=1e-4)
