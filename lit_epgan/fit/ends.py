"""What one process holds of a federation: all of it, the server, or one client; and how a round is run there."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lit_epgan.carriers.contributions import PAGE, Contribution, Contributions, operator_page
from lit_epgan.carriers.policy import Policy, ReportFilter
from lit_epgan.carriers.protocol import LEAST, Endpoint, Frame, Kind, answer_to, endpoint
from lit_epgan.carriers.remote_clients import RemoteClients, agreed
from lit_epgan.carriers.remote_server import RemoteRound, RemoteServer
from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.datamodules.elsewhere import place as take_place
from lit_epgan.engine import (
    ClientRunner,
    Federation,
    Mechanism,
    OptimizedParameters,
    Round,
    Sampler,
    StepHooks,
    Task,
)
from lit_epgan.engine.collectives import mean_of, rank, ranks
from lit_epgan.engine.mechanisms import MASKS, refuse_single_reports
from lit_epgan.engine.private import Private
from lit_epgan.engine.wire import encode_task
from lit_epgan.fit.driver import Alone, Answers, Look
from lit_epgan.lib import tensor_file
from lit_epgan.lib.atomic import write_text
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import few
from lit_epgan.runs.checkpoints import LAST, PREVIOUS, fault
from lit_epgan.runs.yaml_files import load_yaml

if TYPE_CHECKING:
    from lit_epgan.carriers.secure_aggregation import Masking  # needs a library of the extra ``flare``

STARTING = 120.0  # seconds that a server may take to start
CONTRIBUTIONS = "contributions.csv"  # in the server's folder: who contributed when
SENT = "sent.csv"  # in an institution's folder: what has left it


def this_end(
    datamodule: FederatedDataModule, folder: Path, policy: str | None = None, settings: Mapping[str, str] | None = None
) -> "Alone":
    """This process's end of the federation.

    Args:
        datamodule: set up; with data of its own, it takes its place among the clients.
        folder: the run's.
        policy: an institution's, a file.
        settings: which both ends must have alike, values by keys.

    Raises:
        UserError: the data are not those of one client, or the policy is none.
    """
    where = endpoint()
    if where is None:
        refuse_idle_policy(policy)
        return Alone()
    if where.terms.names:
        take_place(datamodule, where.terms.names, where.name or None)
    if where.role == "server":
        return (AtSecureServer if where.terms.secure else AtServer)(where, folder, settings or {})
    return AtInstitution(where, datamodule.client_names, folder, policy, settings or {})


class AtServer(Alone):
    """The server's process: its clients are processes of their own.

    One that is lost is left out of the round, and of those that follow until it calls again.
    """

    holds_clients = False

    def __init__(self, where: Endpoint, folder: Path, settings: Mapping[str, str]) -> None:
        self._terms, self._folder, self._listener = where.terms, folder, where.listener()
        self._settings, self._least = agreed(settings), where.terms.least
        self._federation: Federation
        self._clients: RemoteClients | None = None
        self._rounds: int | None = None
        self._contributions = Contributions(folder / CONTRIBUTIONS)
        self._parts: list[Contribution] = []  # each client's, in the round

    def begin(self, federation: Federation, runner: ClientRunner, trainer: Trainer) -> None:
        """Wait until all clients are there, or have been waited for. UserError: messages of half size are no place for
        what is promised."""
        terms = self._terms
        if terms.half:
            refuse_rounding(terms.secure, federation.mechanism)
        federation.elsewhere = True
        self._federation, self._rounds = federation, trainer.max_epochs
        self._clients = clients = RemoteClients(
            self._listener, federation.names, terms.patience, terms.largest, self._settings, terms.half
        )
        clients.meet(federation.active, terms.gather)
        missing = [federation.names[k] for k in federation.active if k not in clients.present]
        if missing:
            rank_zero_warn(f"{few(missing)} did not call within {terms.gather:g} seconds; the federation begins")

    def run(self, round_: Round, answers: Answers, look: Look) -> None:
        """Ask everybody, take in what comes, and write down who contributed."""
        federation, clients, number = self._federation, self._clients, round_.number
        assert clients is not None
        self._take_in(clients)
        self._parts = [Contribution() for _ in federation.names]
        cohort = federation.server.cohort
        clients.begin(number, cohort, federation.algorithm.trains(number))
        while round_.exchange is not None:
            delivered = {k: federation.private.take_up(federation.names[k]).delivered for k in round_.asked}
            tasks = {k: round_.task(k, own) for k, own in delivered.items()}
            for k in tasks:
                self._parts[k].asked = True
            self._exchange(round_, clients, tasks, delivered)
            self._check(number, clients)
            if round_.exchange is not None:  # the round is not void
                round_.close()
        clients.over(number, round_.dropped)
        for k, part in enumerate(self._parts):
            part.counted = part.asked and k not in round_.why
            part.why = round_.why.get(k, "") if part.asked else ""
        self._contributions.note(number, dict(zip(federation.names, self._parts, strict=True)))
        self._show()

    def _take_in(self, clients: RemoteClients) -> None:
        """Those who have called since the last round know nothing of what they were sent before."""
        for k in clients.meet():
            kept = self._federation.private.clients.get(self._federation.names[k])
            if kept is not None:
                kept.delivered = {}

    def _exchange(
        self, round_: Round, clients: RemoteClients, tasks: dict[int, Task], delivered: Mapping[int, dict[str, int]]
    ) -> None:
        """Ask everybody who is to be asked, and take in what they answer."""
        answers = list(clients.ask(tasks))  # all of them, for most of them say which shapes are right
        round_.settle(answer.report for _, answer in answers if answer is not None)
        for k, answer in answers:
            if answer is None:
                round_.leave_out(k, clients.why(k))
                continue
            self._heard(clients, k)
            answer.private.delivered = delivered[k]
            round_.receive(k, answer)

    def _heard(self, clients: RemoteClients, k: int) -> None:
        heard, part = clients.heard.pop(k, None), self._parts[k]
        if heard is not None:
            part.seconds, part.bytes = part.seconds + heard.seconds, part.bytes + heard.bytes

    def _check(self, number: int, clients: RemoteClients) -> None:
        here = len(clients.present)
        if here < self._least:
            lost = "; ".join(f"{self._federation.names[k]}: {why}" for k, why in clients.lost.items())
            raise UserError(
                f"round {number}: {here} institutions are left of at least {self._least} ({lost}). "
                "Start them again, and go on with --ckpt_path last"
            )

    def _show(self, over: bool = False) -> None:
        """Write the operator's page anew."""
        write_text(
            self._folder / PAGE,
            operator_page(self._folder / CONTRIBUTIONS, self._folder.resolve().name, self._rounds, over),
        )

    def end(self) -> None:
        """Tell the clients that no round follows."""
        if self._clients is not None:
            self._clients.end()
            self._show(over=True)


class AtSecureServer(AtServer):
    """A server that gets the sum of an exchange's answers, and no answer by itself.

    A client that is lost while it works is left out, as without masks. One that is lost after it was ready, and before
    its masked answer is here, makes the round void: the others have masked for it, too.
    """

    def begin(self, federation: Federation, runner: ClientRunner, trainer: Trainer) -> None:
        """Refuse what masks do not admit, then wait for the clients.

        Raises:
            UserError: a round has fewer clients than a sum must have, or the aggregator looks at single reports.
        """
        clients = federation.sampler.rate(len(federation.active)) * len(federation.active)
        if clients < LEAST:
            raise UserError(
                f"secure aggregation sums the reports of at least {LEAST} institutions, and a round has {clients:g}: "
                "the fewer there are, the more each sum shows of them; take more (data.clients_per_round), or leave "
                "secure aggregation out"
            )
        refuse_single_reports(federation.algorithm, {}, federation.aggregator, MASKS)
        federation.secure = True
        self._least = max(self._least, LEAST)
        super().begin(federation, runner, trainer)

    def _exchange(
        self, round_: Round, clients: RemoteClients, tasks: dict[int, Task], delivered: Mapping[int, dict[str, int]]
    ) -> None:
        """Ask who is ready, and those for masked answers."""
        from lit_epgan.carriers.secure_aggregation import MaskedSum  # needs a library of the extra ``flare``

        names, summed = self._federation.names, MaskedSum(self._terms.largest)
        for k, trouble in clients.gather(
            tasks,
            lambda k: Frame(Kind.TASK, encode_task(tasks[k])),
            lambda k, frame: summed.take(names[k], answer_to(tasks[k], frame, Kind.READY)),
        ):
            self._heard(clients, k)
            if trouble != "":
                round_.leave_out(k, clients.why(k) if trouble is None else trouble)
        round_.settle(summed.members.values())
        members = [k for k in tasks if names[k] in summed.members]
        for k in members:
            if (wrong := round_.fault(summed.members[names[k]])) is not None:
                round_.leave_out(k, wrong)
                del summed.members[names[k]]
        members = [k for k in members if names[k] in summed.members]
        if not members:
            return  # the round, when it is closed, says so
        if len(members) < LEAST:
            left_out = few([f"{names[k]}: {why}" for k, why in sorted(round_.why.items())], between="; ")
            missing = f"; {left_out}" if left_out else ""
            round_.void(f"{len(members)} institutions are ready, of at least {LEAST}{missing}")
            return
        told, lost = Frame(Kind.SET, summed.told()), []
        for k, words in clients.gather(
            members, lambda k: told, lambda k, frame: summed.words(answer_to(tasks[k], frame))
        ):
            self._heard(clients, k)
            if words is None:
                round_.leave_out(k, clients.why(k))
                lost.append(names[k])
            else:
                summed.add(words)
        if lost:
            round_.void(f"{few(lost)} got lost when the others had masked for it")
        else:
            kept = {k: Private(delivered=delivered[k]) for k in members}
            round_.receive_sum(kept, *summed.total(), summed.members.values())


class AtInstitution(Alone):
    """An institution's process: one client works here, when the server asks it."""

    holds_server = False

    def __init__(
        self, where: Endpoint, names: Sequence[str], folder: Path, policy: str | None, settings: Mapping[str, str]
    ) -> None:
        if where.name not in names:
            raise UserError(f"the institution {where.name!r} is none of the federation's clients: {', '.join(names)}")
        report_filter = ReportFilter(read_policy(policy), folder / SENT, where.terms.dry)
        client, masking = list(names).index(where.name), _masking(where, names, report_filter.policy)
        self._shared = SharedClient() if ranks() > 1 else None
        link = where.called(STARTING) if rank() == 0 else None
        self._server = RemoteServer(
            link, where.name, client, report_filter, agreed(settings), masking, where.terms.half
        )

    def sampler(self, sampler: Sampler) -> Sampler:
        """Whoever draws the cohorts, this process has one client."""
        return AskedByServer(self._server)

    def begin(self, federation: Federation, runner: ClientRunner, trainer: Trainer) -> None:
        """Several ranks train the one client together."""
        if self._shared is not None:
            runner.around = self._shared.hooks

    def weigh(self, loss: Tensor) -> None:
        """Where several ranks train the client, by this rank's rows."""
        if self._shared is not None:
            self._shared.weigh(loss)

    def round(self, federation: Federation, number: int) -> Any:
        """The server's round, as far as it concerns this client."""
        return RemoteRound(self._server, federation.private, number)

    def go_back(self, checkpoint: dict[str, Any], path: Path) -> None:
        """An institution that is ahead of the server, which has lost a round, goes on from the checkpoint before.

        Args:
            checkpoint: what stands in the last one; what stands in the one before takes its place.
            path: of the last one.
        """
        round_, before = self._server.first(), path.with_name(PREVIOUS)
        if self.ended or checkpoint["epoch"] <= round_ or path.name != LAST or fault(before) is not None:
            return
        earlier = tensor_file.load(before)
        if earlier["epoch"] <= round_:
            rank_zero_warn(f"{path} is of a later round than {round_}, the server's: {before} is gone on from")
            checkpoint.clear()
            checkpoint.update(earlier)

    def check(self, algorithm: str, mechanism: Mechanism | None) -> None:
        """Refuse what the institution's policy does not allow, and noise that several ranks would add.

        Raises:
            UserError: naming the rule.
        """
        if mechanism is not None and mechanism.by_record and ranks() > 1:
            raise UserError(
                f"{type(mechanism).__name__} protects records on one rank, and trainer.devices is {ranks()} at this "
                "institution: set it to 1"
            )
        name = None if mechanism is None else type(mechanism).__name__
        policy = self._server.report_filter.policy
        own = None if mechanism is None else mechanism.own_epsilon(policy.delta)
        policy.check_plan(algorithm, name, own, mechanism is not None and mechanism.noise_seed is not None)

    @property
    def ended(self) -> bool:
        """Whether the server has said that there are no more rounds."""
        return self._server.ended

    def end(self) -> None:
        """The server knows: it has counted the rounds, or will miss this institution."""
        self._server.close()


def refuse_rounding(secure: bool, mechanism: Mechanism | None) -> None:
    """Refuse messages of half size where numbers must arrive as they were sent.

    Raises:
        UserError: naming what would break.
    """
    why = "masks cancel in whole numbers alone, so nothing of a masked sum may be rounded" if secure else ""
    if mechanism is not None and not mechanism.by_record:
        why = f"{type(mechanism).__name__} bounds each report, and rounding may put one above the bound"
    if why:
        raise UserError(f"messages of half size are refused: {why}. Leave --half_messages out")


def refuse_idle_policy(path: str | None) -> None:
    """Refuse a policy that nobody would keep to: it is an institution's, for what leaves it."""
    if path is not None:
        raise UserError(
            f"federation.policy {path} is an institution's, in a federation of processes (`federate`), and nothing "
            "leaves one here: leave it out"
        )


def read_policy(path: str | None) -> Policy:
    """The policy in a file; without one everything is allowed. UserError: the file is missing, or holds no policy."""
    if path is None:
        return Policy()
    try:
        return Policy.of(load_yaml(Path(path)), path)
    except OSError as error:
        raise UserError(f"the policy {path} cannot be read: {str(error).splitlines()[0]}") from error


def _masking(where: Endpoint, names: Sequence[str], policy: Policy) -> "Masking | None":
    """What masks an institution's answers; None where the federation's terms ask for none.

    Raises:
        UserError: the policy asks for it, or the certificate cannot be used.
    """
    policy.check_secure(where.terms.secure)
    if not where.terms.secure:
        return None
    from lit_epgan.carriers.keys import Identity
    from lit_epgan.carriers.secure_aggregation import Masking

    folder = where.certificates
    identity = Identity.of_folder(Path(folder), where.name) if folder else None
    return Masking(where.name, names, identity, policy.cohort or LEAST)


class AskedByServer(Sampler):
    """The one client of an institution, in every round."""

    def __init__(self, server: RemoteServer) -> None:
        self._server = server

    def draw(self, clients: Sequence[int], seed: int, round_: int) -> list[list[int]]:
        """This client."""
        return [[self._server.client]]

    def rate(self, clients: int) -> float:
        """1: whoever is drawn less often pays for no less."""
        return 1.0


class SharedClient:
    """One client that several ranks train: each has a part of every batch, and gradients are averaged.

    A batch's loss must be a mean over its rows, as under distributed data parallel training. Ranks draw the same
    random numbers: noise on parameters is alike everywhere, and so is the noise that a generator starts from.

    Attributes:
        factor: of this rank's loss, so that the mean over ranks is the batch's.
    """

    def __init__(self) -> None:
        self.factor = 1.0

    @property
    def hooks(self) -> StepHooks:
        """What the client's steps are told."""
        return StepHooks.of(batch=self.part, gradient=self.average)

    def part(self, batch: Any) -> Any:
        """This rank's rows of a batch; all of them where there are fewer rows than ranks.

        Args:
            batch: any nesting of tensors whose first dimension counts rows.
        """
        rows = rows_of(batch)
        own = len(range(rank(), rows, ranks()))
        if rows < ranks():
            self.factor = 1.0
            return batch
        self.factor = own * ranks() / rows
        return apply_to_collection(
            batch, Tensor, lambda tensor: tensor[rank() :: ranks()] if tensor.dim() and len(tensor) == rows else tensor
        )

    def weigh(self, loss: Tensor) -> None:
        """Let the loss's gradient count by this rank's rows."""
        if self.factor != 1.0 and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * self.factor)

    def average(self, optimized: OptimizedParameters) -> None:
        """Average the gradients of an optimizer's parameters over ranks."""
        parameters = [p for group in optimized.optimizer.param_groups for p in group["params"]]
        mean_of([p.grad for p in parameters if p.grad is not None])


def rows_of(batch: Any) -> int:
    """The first dimension of a batch's first tensor."""
    found: list[int] = []
    apply_to_collection(batch, Tensor, lambda tensor: found.append(len(tensor) if tensor.dim() else 1))
    return found[0] if found else 0
