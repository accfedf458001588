"""Questions about discrepancies: over sites they are one data set's, and they give R mu away."""

import torch
from torch import Tensor

from lit_epgan.bayes import RandomFourierFeatures
from lit_epgan.bayes.mean_embeddings import Question, SummedAnswer, answered, mean_embedding, statistic
from lit_epgan.randomness import generator_for

G = generator_for("questions")
R, MEANS = (torch.randn(shape, generator=G, dtype=torch.float64) for shape in ((3, 8), (20, 8)))
SITES = {30: torch.randn(8, generator=G, dtype=torch.float64), 5: torch.ones(8, dtype=torch.float64)}
POOLED = sum(n * mean for n, mean in SITES.items()) / 35


def over_sites(question: Question) -> Tensor:
    return sum(n * question.discrepancies(mean) for n, mean in SITES.items()) / 35


def test_a_discrepancy_is_a_distance_under_the_metric():
    """(mu_i - mu)^T R^T R (mu_i - mu), one by one."""
    found = Question.of(R, MEANS).discrepancies(POOLED)
    metric = R.T @ R
    for own, mean in zip(found, MEANS, strict=True):
        assert torch.allclose(own, (mean - POOLED) @ metric @ (mean - POOLED))


def test_sums_over_sites_are_the_pooled_discrepancies_and_a_constant():
    question = Question.of(R, MEANS)
    more = over_sites(question) - question.discrepancies(POOLED)
    assert torch.allclose(more, more[0])
    spread = sum(n * (R @ (mean - POOLED)).square().sum() for n, mean in SITES.items()) / 35
    assert torch.allclose(more[0], torch.as_tensor(spread))


def test_what_the_sums_give_away_is_the_pooled_mean_under_the_metric():
    question = Question.of(R, MEANS)
    for asked in (question, Question(R, question.simulated[:4])):  # r + 1 of them are enough
        found = statistic(asked, SummedAnswer(over_sites(asked), 35.0))
        assert torch.allclose(found, R @ POOLED, atol=1e-8, rtol=0)


def test_whoever_holds_the_mean_answers_every_question_with_what_he_knows():
    noise, seen = torch.eye(8, dtype=torch.float64), []

    def asking():
        for rows in (2, 5):
            seen.append((yield Question.of(R, MEANS[:rows])))
        return "found"

    assert answered(asking(), POOLED, 35.0, noise, 0.5) == "found"
    assert [len(answer.discrepancies) for answer in seen] == [2, 5]
    assert all((a.records, a.noise is noise, a.scaled) == (35.0, True, 0.5) for a in seen)
    assert torch.equal(seen[1].discrepancies, Question.of(R, MEANS[:5]).discrepancies(POOLED))


def test_the_mean_embedding_is_that_of_the_features_precision():
    phi = RandomFourierFeatures(2, 4, [1.0], generator_for("features")).float()
    x = torch.randn(9, 2, generator=G, dtype=torch.float64)
    found = mean_embedding(phi, x)
    assert found.dtype == torch.float64
    assert torch.equal(found, torch.stack([row.double() for row in phi(x.float())]).mean(0))
