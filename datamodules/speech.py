"""Speech as a federation: a session of several speakers in one room is a client."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.datamodules.client_data import ClientData
from lit_epgan.datamodules.clients import BatchDataset
from lit_epgan.lib.bounds import at_least
from lit_epgan.lib.cache import cache_folder
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for
from lit_epgan.speech.corpora import TAGS, Corpus, OnError, check_tag, chime5, from_manifest
from lit_epgan.speech.decoding import Decoder
from lit_epgan.speech.frames import CHUNK, FUTURE, INPUTS, SpectralMasking, chunk_starts, padded, with_future
from lit_epgan.speech.gmm import FEWEST
from lit_epgan.speech.phones import PDFS, PHONES
from lit_epgan.speech.preparation import UNALIGNED, Prepared, Utterance, prepare
from lit_epgan.speech.sessions import Split, plan_sessions
from lit_epgan.speech.stages import Stages
from lit_epgan.speech.synthesis import embedded

PARTITIONS = ("sessions", "iid", "pooled")
NAMED = 5  # utterances left out that a warning names


class ChunkDataset(BatchDataset):
    """Chunks of 20 frames of utterances that stay in memory once, however often frames are seen: log-mel features
    (frames, 40) of all, each padded by its future, their HMM states (frames,), and where this data set's chunks begin
    (n,)."""

    def __init__(self, mel: Tensor, pdfs: Tensor, starts: Tensor) -> None:
        self.mel, self.pdfs, self.starts = mel, pdfs, starts

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One chunk: frames (20, 200) and states (20,)."""
        x, pdfs = self.fetch([index])
        return x[0], pdfs[0]

    def fetch(self, indices: list[int]) -> list[Tensor]:
        """A batch at once: frames, float tensor (b, 20, 200), and their states, int64 (b, 20)."""
        rows = self.starts[indices][:, None] + torch.arange(CHUNK + FUTURE)
        return [with_future(self.mel[rows]), self.pdfs[rows[:, :CHUNK]]]

    def of(self, starts: Tensor) -> "ChunkDataset":
        """Other chunks of the same utterances."""
        return ChunkDataset(self.mel, self.pdfs, starts)


class SpeechDataModule(FederatedDataModule):
    """Sessions as clients: their chunks to train on, others' to validate and test, and what decodes them.

    By default a corpus that espeak speaks on first use; results of every stage are kept in the cache under the name of
    what they came from.

    Args:
        manifest: a user's own corpus, a CSV file, see ``lit_epgan.speech.corpora.read_manifest``.
        chime5: CHiME-5's folder.
        train_sessions, dev_sessions, eval_sessions: of the embedded corpus; speakers and rooms are never the same.
        minutes: of all its training sessions together, at least.
        words: of its development sessions together, and of its evaluation sessions, at least.
        heterogeneity: of its sessions, from 0 (i.i.d.) to 1, see ``lit_epgan.speech.sessions.plan_sessions``.
        imbalance: how many times the longest of its training sessions is as long as the shortest.
        speakers: of each of its sessions.
        grammar: sentences of its grammar's text.
        corpus_seed: of everything that is drawn for it.
        partition: ``sessions``: each is a client; ``iid``: as many chunks, dealt at random, the control that shows
            what the sessions' differences cost; ``pooled``: one client has all.
        iterations, gaussians: of the training of the Gaussian mixtures that align the corpus; at least 8 iterations.
        outside: whether a manifest may name audio outside of its folder, by an absolute path, by ``..`` or by a link;
            for manifests that you trust.
        tags: pairs of brackets: what stands within one in a manifest's text, such as <noise> or (laughs), is no word.
        on_error: audio that cannot be used is refused, or skipped with a warning that names it.
        mask_bins, mask_frames, masks: of ``lit_epgan.speech.frames.SpectralMasking``, on what is trained on; by
            default nothing is masked. They depend on (seed, round, client) alone.
        cache_dir: by default the user's cache.
        workers: processes that speak and compute features.
        federated: settings of ``FederatedDataModule``.

    Attributes:
        pdfs: number of HMM states.
        inputs, shape: columns of a frame, and (frames, columns) of a chunk.
        label_names: the phones, by which the partition is shown.
    """

    def __init__(
        self,
        manifest: str | None = None,
        chime5: str | None = None,
        train_sessions: int = 16,
        dev_sessions: int = 12,
        eval_sessions: int = 12,
        minutes: float = 120.0,
        words: int = 3000,
        heterogeneity: float = 1.0,
        imbalance: float = 4.0,
        speakers: int = 8,
        grammar: int = 1000,
        corpus_seed: int = 0,
        partition: Literal["sessions", "iid", "pooled"] = "sessions",
        iterations: int = 24,
        gaussians: int = 1000,
        on_error: OnError = "refuse",
        outside: bool = False,
        tags: Sequence[str] = TAGS,
        mask_bins: int = 0,
        mask_frames: int = 0,
        masks: int = 1,
        cache_dir: str | None = None,
        workers: int = 2,
        **federated: Any,
    ) -> None:
        super().__init__(**federated)
        if manifest is not None and chime5 is not None:
            raise UserError("data.manifest and data.chime5 are both given: choose one corpus.")
        for name, given, known in (("partition", partition, PARTITIONS), ("on_error", on_error, ("refuse", "skip"))):
            if given not in known:
                raise UserError(f"data.{name} is {given!r}; it must be one of {', '.join(known)}.")
        at_least(1, "data", grammar=grammar, gaussians=gaussians, workers=workers)
        at_least(FEWEST, "data", iterations=iterations)
        for pair in tags:
            check_tag(pair)
        self.manifest, self.chime5, self.outside, self.tags = manifest, chime5, outside, tags
        self.sessions: dict[Split, int] = {"train": train_sessions, "dev": dev_sessions, "eval": eval_sessions}
        self.minutes, self.words, self.heterogeneity, self.imbalance = minutes, words, heterogeneity, imbalance
        self.speakers, self.grammar, self.corpus_seed = speakers, grammar, corpus_seed
        self.partition, self.iterations, self.gaussians, self.on_error = partition, iterations, gaussians, on_error
        self.masking = SpectralMasking(mask_bins, mask_frames, masks) if mask_bins or mask_frames else None
        self._masks = generator_for("masks")
        self.stages = Stages(Path(cache_dir).expanduser() if cache_dir else cache_folder() / "speech")
        self.workers = workers
        self.pdfs, self.inputs, self.shape, self.label_names = PDFS, INPUTS, (CHUNK, INPUTS), list(PHONES)
        self._prepared: Prepared | None = None

    def prepare_data(self) -> None:
        """Make what is not in the cache, on one process only; ``load`` then finds it."""
        self._prepare()

    def load(self) -> ClientData:
        """Cut the corpus into chunks and deal them out. UserError: names audio that cannot be used, or a mistake in a
        manifest."""
        prepared = self.prepared
        clients = {name: chunks_of(own) for name, own in prepared.utterances["train"].items()}
        joined, starts = join(clients)
        if self.partition == "pooled":
            starts = {"all": torch.cat(list(starts.values()))}
        elif self.partition == "iid":
            starts = dealt(starts, self.seed)
        held_out = {
            split: chunks_of([u for own in prepared.utterances[split].values() for u in own])
            for split in ("dev", "eval")
        }
        return ClientData(
            train={name: joined.of(own) for name, own in starts.items()},
            val=held_out["dev"],
            test=held_out["eval"],
            labels={name: joined.pdfs[own + CHUNK // 2] // (PDFS // len(PHONES)) for name, own in starts.items()},
        )

    @property
    def prepared(self) -> Prepared:
        return self._prepared or self._prepare()

    @property
    def decoder(self) -> Decoder:
        """From posteriors of HMM states to words."""
        return self.prepared.decoder

    def utterances(self, split: Split) -> list[Utterance]:
        """All utterances of a split, session by session."""
        return [each for own in self.prepared.utterances[split].values() for each in own]

    def begins(self, client: int) -> None:
        """A client begins to train, with masks of its own."""
        super().begins(client)
        self._masks = generator_for(self.seed, self.current_round, client, "masks")

    def as_trained(self, batch: Any) -> Any:
        return batch if self.masking is None else [self.masking(batch[0], self._masks), *batch[1:]]

    def _prepare(self) -> Prepared:
        if self._prepared is None:
            rank_zero_info(f"Speech is prepared, for minutes, where it is not yet kept in {self.stages.root}.")
            self._prepared = prepare(
                self._corpus(), self.stages, self.iterations, self.gaussians, self.on_error, self.workers
            )
            skipped = self._prepared.skipped
            if skipped:
                rank_zero_warn(f"left out {len(skipped)} utterances: {' '.join(skipped[:NAMED])}")
            unknown = self._prepared.unknown
            if unknown:
                examples = ", ".join(word for word, _ in unknown.most_common(NAMED))
                rank_zero_warn(
                    f"CMUdict has no pronunciation of {len(unknown)} words, said {unknown.total()} times ({examples}): "
                    "none of them can be recognised. Spell numbers out, and write English words."
                )
        return self._prepared

    def _corpus(self) -> Corpus:
        if self.manifest is not None:
            return from_manifest(Path(self.manifest).expanduser(), self.outside, self.tags)
        if self.chime5 is not None:
            return chime5(Path(self.chime5).expanduser())
        plans = plan_sessions(
            self.sessions, self.minutes, self.words, self.heterogeneity, self.imbalance, self.speakers, self.corpus_seed
        )
        return embedded(plans, self.stages, self.grammar, self.workers, self.corpus_seed)


def chunks_of(utterances: list[Utterance]) -> ChunkDataset:
    """The chunks of utterances, one after another; one without alignment has none."""
    mel, pdfs, starts, row = [], [], [], 0
    for each in utterances:
        if each.pdfs[0] == UNALIGNED:
            continue
        mel.append(padded(each.mel))
        pdfs.append(torch.cat([each.pdfs, torch.full((FUTURE,), UNALIGNED)]))
        starts += [row + start for start in chunk_starts(len(each.mel))]
        row += len(mel[-1])
    if not mel:
        return ChunkDataset(torch.zeros(0, INPUTS // (1 + FUTURE)), torch.zeros(0).long(), torch.zeros(0).long())
    return ChunkDataset(torch.cat(mel), torch.cat(pdfs), torch.tensor(starts, dtype=torch.int64))


def join(clients: dict[str, ChunkDataset]) -> tuple[ChunkDataset, dict[str, Tensor]]:
    """All clients' frames one after another, and where each client's chunks begin in them."""
    starts, row = {}, 0
    for name, own in clients.items():
        starts[name] = own.starts + row
        row += len(own.mel)
    mel, pdfs = (torch.cat([getattr(own, name) for own in clients.values()]) for name in ("mel", "pdfs"))
    return ChunkDataset(mel, pdfs, torch.cat(list(starts.values()))), starts


def dealt(starts: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """All chunks dealt at random to clients as large as they were: {client: int64 tensor (n_k,)}."""
    every = torch.cat(list(starts.values()))
    shuffled = every[torch.randperm(len(every), generator=generator_for(seed, "iid"))]
    parts = shuffled.split([len(own) for own in starts.values()])
    return dict(zip(starts, parts, strict=True))
