"""Heterogeneity moves variety from within sessions to between them: topics, voices, rates, and what is recorded how."""

import numpy as np
import pytest

from lit_epgan.speech import synthesis
from lit_epgan.speech.sessions import FAMILIES, SNR, SPLITS, plan_sessions

SESSIONS = {"train": 16, "dev": 6, "eval": 6}


def training_plans(heterogeneity, sessions=100):
    plans = plan_sessions({**SESSIONS, "train": sessions}, 60, 3000, heterogeneity)
    return [plan for plan in plans if plan.split == SPLITS[0]]


def test_topics_accents_voices_and_rates():
    def within(heterogeneity):
        """Accents and families in a session, and how its slowest speaker compares to its fastest; means."""
        train = training_plans(heterogeneity)
        accents = [len({s.voice.split("+")[0] for s in p.speakers}) for p in train]
        families = [len({s.voice.split("+")[1] in FAMILIES["female"] for s in p.speakers}) for p in train]
        rates = [min(s.rate for s in p.speakers) / max(s.rate for s in p.speakers) for p in train]
        return np.var([p.topics for p in train]), *(np.mean(each) for each in (accents, families, rates))

    none, many, both, varied = within(0.0)
    own, one, one_family, alike = within(1.0)
    assert none == pytest.approx(0, abs=1e-12)
    assert own > 0.03
    assert one == one_family == 1
    assert many > 2.5
    assert both > 1.9
    assert alike > 0.9
    assert varied < 0.75


@pytest.fixture
def conditions_of(tmp_path, monkeypatch):
    """What each utterance of a plan is recorded under, without a sound."""

    def recorded(plan):
        seen = []
        monkeypatch.setattr(synthesis, "_spoken", lambda plan: [("anna", "two", np.zeros(8))] * 200)
        monkeypatch.setattr(
            synthesis, "record", lambda samples, others, conditions, rng: (seen.append(conditions), samples)[1]
        )
        synthesis._speak_session(plan, tmp_path)
        return seen

    return recorded


@pytest.mark.parametrize("heterogeneity", [0.0, 0.4, 1.0])
def test_an_utterance_has_its_sessions_room_noise_and_channel_or_a_draw_of_its_own(heterogeneity, conditions_of):
    plan = training_plans(heterogeneity, 2)[1]
    seen = conditions_of(plan)
    own = [each for each in seen if each == plan.own]
    assert len(own) / len(seen) == pytest.approx(heterogeneity, abs=0.1)
    others = set(seen) - {plan.own}
    assert len(others) == len(seen) - len(own)  # no two alike
    if others:
        snr = [each.snr for each in others]
        assert SNR[0] <= min(snr) < SNR[0] + 1
        assert SNR[1] - 1 < max(snr) <= SNR[1]
        assert {each.noise for each in others} == {"white", "pink", "hum", "babble"}
        for name, low, high in (("reverberation", 0.2, 0.7), ("low", 50, 400), ("high", 2500, 7600)):
            assert np.std([getattr(each, name) for each in others]) == pytest.approx((high - low) / 12**0.5, rel=0.15)
