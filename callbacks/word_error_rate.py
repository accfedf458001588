"""Word error rates: of some development utterances each round, of all evaluation sessions in a test."""

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from numpy.typing import NDArray

from lit_epgan.callbacks.round_evaluation import RoundEvaluation
from lit_epgan.lib.atomic import replacing
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import csv_cell
from lit_epgan.networks.modes import evaluating
from lit_epgan.speech.decoding import WordErrors, interval, total, word_errors
from lit_epgan.speech.frames import mean_of_windows, padded, window_rows, windows, with_future
from lit_epgan.speech.preparation import Prepared, Utterance

Last = Literal["nothing", "dev", "test"]
TOGETHER = 8  # utterances in one pass of the network


class WordErrorRate(RoundEvaluation):
    """Decodes with the module's posteriors and logs word error rates in percent.

    Each look logs ``wer_dev`` of some development utterances. In a test, the acoustic scale is first chosen on all of
    them: ``acoustic_scale``, ``wer_dev_all``. Then every evaluation utterance is decoded: ``wer``, ``wer_low`` and
    ``wer_high`` (a 95 % bootstrap interval); the run's folder gets ``test/word_errors.csv``, a row for each session,
    and ``test/hypotheses.csv``, each hypothesis next to its reference.

    The module maps frames (batch, frames, inputs) to log posteriors (batch, frames, states) and has learnt chunks of 20
    frames; those of an utterance are means over such windows, one every five frames. The data module has ``decoder``
    and ``utterances(split)``.

    Args:
        utterances: development utterances that are decoded, evenly spread over the sessions; in a test all.
        scale: acoustic scale of the rounds.
        scales: those that a test chooses from, upwards until error rates rise.
        mixtures: whether a test also decodes with the Gaussian mixtures that aligned the corpus: ``wer_gmm_dev``,
            ``wer_gmm``.
        last: what is added to the last round's look, for a study whose runs are not tested apart: ``nothing``; ``dev``,
            a test's first half, to choose settings by without a look at the evaluation sessions; ``test``, all of it.
        every_n_epochs: rounds from one look to the next.

    Raises:
        UserError: no utterances or scales, an unknown ``last``, or a data module that cannot decode.
    """

    def __init__(
        self,
        utterances: int = 60,
        scale: float = 0.15,
        scales: Sequence[float] = (0.08, 0.1, 0.125, 0.15, 0.2, 0.25),
        mixtures: bool = False,
        every_n_epochs: int = 1,
        last: Last = "nothing",
    ) -> None:
        super().__init__(every_n_epochs)
        if utterances < 1 or not scales or not all(each > 0 for each in (scale, *scales)):
            raise UserError("WordErrorRate needs at least one utterance and positive acoustic scales.")
        if last not in get_args(Last):
            raise UserError(f"WordErrorRate's last is {last!r}; it is one of {', '.join(get_args(Last))}.")
        self.utterances, self.scale, self.scales, self.mixtures = utterances, scale, tuple(scales), mixtures
        self.last = last

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse data that cannot be decoded before anything is trained."""
        if not hasattr(trainer.datamodule, "decoder"):  # type: ignore[attr-defined]
            raise UserError("WordErrorRate decodes speech: take lit_epgan.datamodules.SpeechDataModule as data.")

    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        dev = data.utterances("dev")
        if not trainer.testing:
            count = min(self.utterances, len(dev))
            some = [dev[i * len(dev) // count] for i in range(count)]
            errors = self._errors(data, some, log_posteriors(pl_module, some), self.scale)
            pl_module.log("wer_dev", total([e for e, _ in errors]).rate, sync_dist=True)
        is_last = trainer.state.fn == "fit" and trainer.current_epoch + 1 == trainer.max_epochs
        asked = "test" if trainer.testing else self.last if is_last else "nothing"
        if asked == "nothing":
            return
        scale, rate = self._best_scale(data, log_posteriors(pl_module, dev))
        pl_module.log_dict({"acoustic_scale": scale, "wer_dev_all": rate}, sync_dist=True)
        if asked == "test":
            self._test(trainer, pl_module, scale)
        if self.mixtures:
            self._log_mixtures(pl_module, data.prepared, evaluation=asked == "test")

    def _best_scale(self, data: Any, scores: list[NDArray]) -> tuple[float, float]:
        """The scale that decodes the development utterances best, and their word error rate."""
        dev = data.utterances("dev")
        return lowest(self.scales, lambda scale: total([e for e, _ in self._errors(data, dev, scores, scale)]).rate)

    def _test(self, trainer: Trainer, pl_module: LightningModule, scale: float) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        held_out = data.utterances("eval")
        decoded = self._errors(data, held_out, log_posteriors(pl_module, held_out), scale)
        counts = [errors for errors, _ in decoded]
        low, high = interval(counts)
        pl_module.log_dict({"wer": total(counts).rate, "wer_low": low, "wer_high": high}, sync_dist=True)
        if trainer.is_global_zero:
            write_report(Path(trainer.default_root_dir) / "test", held_out, decoded)

    def _errors(
        self, data: Any, utterances: list[Utterance], scores: list[NDArray], scale: float
    ) -> list[tuple[WordErrors, str]]:
        hypotheses = [data.decoder.words(each, scale) for each in scores]
        return [(word_errors(u.recording.text, h), h) for u, h in zip(utterances, hypotheses, strict=True)]

    def _log_mixtures(self, pl_module: LightningModule, prepared: Prepared, evaluation: bool) -> None:
        """The mixtures' word error rates, their scale chosen on the development sessions."""
        scales = (0.07, 0.1, 0.125, 0.15, 0.2)
        best, rate = lowest(scales, lambda scale: total(prepared.errors_of_mixtures("dev", scale)).rate)
        pl_module.log("wer_gmm_dev", rate, sync_dist=True)
        if evaluation:
            pl_module.log("wer_gmm", total(prepared.errors_of_mixtures("eval", best)).rate, sync_dist=True)


def lowest(scales: Sequence[float], rate: Callable[[float], float]) -> tuple[float, float]:
    """The scale of the lowest rate, and the rate: upwards from the smallest until rates rise, taken to fall before."""
    best = (0.0, math.inf)
    for scale in sorted(scales):
        found = rate(scale)
        if found > best[1]:
            break
        best = scale, found
    return best


@torch.no_grad()
def log_posteriors(module: LightningModule, utterances: Sequence[Utterance]) -> list[NDArray[np.float32]]:
    """log p(state | frames) (frames, states) of each utterance in evaluation mode, as means over windows."""
    scores: list[NDArray[np.float32]] = []
    like = next(module.parameters())  # also where a Trainer's precision has changed its type
    with evaluating(module):
        for first in range(0, len(utterances), TOGETHER):
            x = [with_future(padded(u.mel)) for u in utterances[first : first + TOGETHER]]
            rows = [window_rows(len(each)) for each in x]
            cut = torch.cat([windows(each, own) for each, own in zip(x, rows, strict=True)])
            posteriors = module(cut.to(like)).float().cpu().split([len(own) for own in rows])
            means = [mean_of_windows(each, own) for each, own in zip(posteriors, rows, strict=True)]
            scores += [mean[: len(each)].numpy() for mean, each in zip(means, x, strict=True)]
    return scores


def write_report(folder: Path, utterances: Sequence[Utterance], decoded: Sequence[tuple[WordErrors, str]]) -> None:
    """``word_errors.csv``: counts and intervals by session and of all; ``hypotheses.csv``: beside the references."""
    by_session: dict[str, list[WordErrors]] = {}
    for utterance, (errors, _) in zip(utterances, decoded, strict=True):
        by_session.setdefault(utterance.recording.session, []).append(errors)
    by_session["all"] = [errors for errors, _ in decoded]
    header = ["session", "words", "substitutions", "deletions", "insertions", "wer", "low", "high"]
    rows = []
    for session, counts in by_session.items():
        sum_, (low, high) = total(counts), interval(counts)
        numbers = [sum_.words, sum_.substitutions, sum_.deletions, sum_.insertions]
        rows.append([session, *numbers, f"{sum_.rate:.2f}", f"{low:.2f}", f"{high:.2f}"])
    _write_table(folder / "word_errors.csv", header, rows)
    pairs = zip(utterances, decoded, strict=True)
    lines = [[u.recording.session, u.recording.audio.name, e.errors, u.recording.text, h] for u, (e, h) in pairs]
    _write_table(folder / "hypotheses.csv", ["session", "audio", "errors", "reference", "hypothesis"], lines)


def _write_table(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    with replacing(path) as beside, beside.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *([csv_cell(str(cell)) for cell in row] for row in rows)])
