"""A seat: one module at which clients work, one after another, whoever drives the steps and carries the messages."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lit_epgan.engine.algorithm import Algorithm
from lit_epgan.engine.at_work import AtWork
from lit_epgan.engine.jobs import Answer
from lit_epgan.engine.mechanisms import Mechanism
from lit_epgan.engine.messages import Count, Report, Task, Term
from lit_epgan.engine.misspelt import check_hooks
from lit_epgan.engine.private import Private
from lit_epgan.engine.work import Client, Memo, OptimizedParameters, Progress, Training, Work
from lit_epgan.engine.workplace import Workplace
from lit_epgan.errors import UserError
from lit_epgan.precision import no_autocast
from lit_epgan.randomness import derive_seed, seed_streams

WEIGHT = "federation/weight"


class Seat:
    """Clients work here by tasks; nothing of the server is known here but what a task brings.

    Training: ``open``; then for each batch ``batch``, and around the module's own step ``extra_loss``,
    ``before_step`` and ``after_step``; then ``close``. Without training: ``answer``.

    Args:
        algorithm: whose ``works`` the clients do.
        place: the module and what belongs to it.
        names: the clients' names.
        seed: the federation's.
        mechanism: sees every report before it leaves.
        memo: what follows from the broadcast alone; shared by seats side by side.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        place: Workplace,
        names: Sequence[str],
        seed: int,
        mechanism: Mechanism | None = None,
        memo: Memo | None = None,
    ) -> None:
        self.algorithm, self.place, self.mechanism = algorithm, place, mechanism
        self._names, self._seed = names, seed
        self._at: AtWork | None = None
        self._memo = memo if memo is not None else Memo()

    def beside(self, place: Workplace, memo: Memo) -> "Seat":
        """A seat at another place, for another client of the same exchange; seats with one memo share what it holds."""
        return Seat(self.algorithm, place, self._names, self._seed, self.mechanism, memo)

    @property
    def client(self) -> Client | None:
        """The client at work, if any."""
        return self._at.client if self._at is not None else None

    # Training ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def open(self, task: Task, private: Private, steps: int | None = None) -> None:
        """A client takes up the module.

        Args:
            task: what it is asked.
            private: what it kept, as a copy that may be changed.
            steps: how many local steps there will be, where that is known.
        """
        at = self._begin(task, private, steps, "steps")
        self._at = at
        for work in at.works:
            work.begin()

    @torch.no_grad()
    def batch(self, batch: Any, weight: float) -> Any:
        """The batch that the client trains on; the step before it is over.

        Args:
            batch: the client's own.
            weight: n_k, as far as it is known by now.
        """
        assert self._at is not None
        client = self._at.client
        client.progress.weight = weight
        self._at.end_step()
        for work in self._at.hooks["batch"]:
            if not work.rests:
                batch = work.batch(batch)
        client.progress.step += 1
        return batch

    def steps_done(self, steps: int, weight: float) -> None:
        """The client has done so many steps, in which no work had a part.

        Args:
            steps: how many.
            weight: n_k.
        """
        assert self._at is not None
        self._at.client.progress.step, self._at.client.progress.weight = steps, weight

    def overridden(self) -> set[str]:
        """The hooks of a step that the works of the client at work have."""
        return {hook for hook, works in self._at.hooks.items() if works} if self._at is not None else set()

    def give_up_batch(self) -> None:
        """The batch taken up last is not trained on after all."""
        if self._at is not None:
            self._at.client.progress.step -= 1

    def extra_loss(self) -> Tensor | None:
        """The sum () of the works' extra losses; None if there is none."""
        total: Tensor | None = None
        if self._at is not None:
            for work in self._at.hooks["extra_loss"]:
                loss = None if work.rests else work.extra_loss()
                if loss is not None:
                    total = loss if total is None else total + loss
        return total

    def adds_loss(self) -> bool:
        """Whether any work of the client at work may have an extra loss."""
        return self._at is not None and bool(self._at.hooks["extra_loss"])

    def before_step(self, optimized: OptimizedParameters) -> None:
        """One optimizer is about to step: gradients are adjusted, the algorithm's networks step."""
        if self._at is None or not (self._at.hooks["adjust_gradients"] or self.place.networks.server is not None):
            return  # nothing is to be done, at no cost
        with torch.no_grad(), no_autocast(optimized.flat.device):
            for work in self._at.hooks["adjust_gradients"]:
                if not work.rests and optimized in work.client.optimized:
                    work.adjust_gradients(optimized)
            self.place.networks.step()

    def after_step(self, optimized: OptimizedParameters) -> None:
        """One optimizer has stepped."""
        if self._at is None or not self._at.hooks["after_step"]:
            return
        with torch.no_grad(), no_autocast(optimized.flat.device):
            for work in self._at.hooks["after_step"]:
                if not work.rests and optimized in work.client.optimized:
                    work.after_step(optimized)

    @torch.no_grad()
    def close(self) -> Answer | None:
        """The client at work is done; None if there is none, or if its work does not count."""
        at, self._at = self._at, None
        if at is None:
            return None
        try:
            if at.client.weight == 0:
                self._forget()
                return None
            return self._answer(at)
        finally:
            for work in at.works:
                work.leave()

    def _forget(self) -> None:
        """What the client at work did to the module, outside its parameters, goes back with the next load."""
        self.place.tensors.note_changes()
        self.place.attributes.clear()

    @torch.no_grad()
    def abandon(self) -> bool:
        """Leave the client at work, if any, without an answer; whether there was one."""
        at, self._at = self._at, None
        for work in at.works if at is not None else ():
            work.leave()
        if at is not None:
            self._forget()
        return at is not None

    # Without training -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def answer(self, task: Task, private: Private, weight: float) -> Answer:
        """Answer a question that needs no training.

        Args:
            task: what is asked.
            private: what the client kept, as a copy that may be changed.
            weight: n_k, its number of records.
        """
        at = self._begin(task, private, None, task.question)
        at.client.progress.weight = weight
        try:
            for work in at.works:
                work.begin()
            return self._answer(at)
        finally:
            for work in at.works:
                work.leave()

    # Both -------------------------------------------------------------------------------------------------------------

    def _begin(self, task: Task, private: Private, steps: int | None, stream: str) -> AtWork:
        place, mechanism = self.place, self.mechanism
        before = private.copy() if mechanism is not None and mechanism.private else None
        seed_streams(derive_seed(self._seed, task.round, task.client, stream, *([task.exchange] if task.again else [])))
        client = Client(
            task.client,
            self._names[task.client],
            len(self._names),
            task.round,
            self._seed,
            place.module,
            place.flat,
            list(place.optimized),
            private.algorithm,
            private.released,
            steps,
            Progress(),
            restart=self._restart,
            data=lambda: place.data(task.client, task.round),
            gradient=lambda: place.gradient(place.data(task.client, task.round)),
            loss=lambda: place.loss(place.data(task.client, task.round)),
            memo=self._memo.of(task),
        )
        works = self.algorithm.works(task.question, client, task.received)
        for work in works:
            check_hooks(type(work), Work)
        if mechanism is not None:
            works = mechanism.around(works, client, type(self.algorithm).__name__, task.training)
        training = next((work for work in works if isinstance(work, Training)), None)
        at = AtWork(task, client, works, None, private, before)
        at.start = training.start() if training is not None else task.received.get("parameters")
        for hook in ("batch", "extra_loss", "adjust_gradients", "after_step", "after_local_step"):
            at.hooks[hook] = [work for work in works if type(work).overrides(hook)]
        if task.training:
            self._check_optimizers(at)
        self._load(at, private.optimizers)
        place.attributes.begin(private.attributes)
        return at

    def _check_optimizers(self, at: AtWork) -> None:
        changes = at.hooks["extra_loss"] or at.hooks["adjust_gradients"]
        if changes and any(isinstance(each.optimizer, torch.optim.LBFGS) for each in self.place.optimized):
            raise UserError(
                f"{type(self.algorithm).__name__} adds to a client's loss or looks at each step's gradient, and LBFGS "
                "asks for both several times in a step and compares values that lack what is added: let "
                "configure_optimizers give another, such as Adam"
            )

    def _restart(self) -> None:
        assert self._at is not None, "a client starts anew in training only"
        self.place.tensors.note_changes()
        self._load(self._at, None)

    def _load(self, at: AtWork, optimizers: dict[str, Any] | None) -> None:
        """What the client starts from: the received model, its personal layers, fresh optimizers or the ones given."""
        place = self.place
        if at.start is not None:
            place.flat.load(at.start)
        place.tensors.load(at.task.received, at.private.personal)
        place.networks.load(at.task.received)
        place.optimizers.begin(optimizers)

    def _answer(self, at: AtWork) -> Answer:
        place, client = self.place, at.client
        place.flat.adopt()
        at.end_step()
        for work in at.works:
            work.end()
        for work in at.works:  # what the works changed on the module is not the client's
            work.leave()
        if at.task.training:
            at.private.optimizers = place.optimizers.collect()
            at.private.personal = place.tensors.read_personal()
            at.private.attributes = place.attributes.collect(client.name)
        place.attributes.clear()
        report: dict[str, Term] = {}
        for work in at.works:
            report |= work.report()
        if at.task.training:
            report |= place.tensors.changes(client.weight)
            report |= place.networks.changes(client.weight)
            report[WEIGHT] = Count(client.weight, True)
        sent: Report = report if self.mechanism is None else self.mechanism.at_client(report, at.task.received)
        return Answer(sent, at.kept(report), client.step)
