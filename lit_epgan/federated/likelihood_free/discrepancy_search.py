"""GRAFFL in the form that works: simulated data sets go to the clients, and one number for each comes back."""

from collections.abc import Generator

import torch

from lit_epgan.bayes.inference import Stage
from lit_epgan.bayes.mean_embeddings import Asking, Question, SummedAnswer
from lit_epgan.engine import Broadcast, Client, Exchange, Message, Rounds, Server
from lit_epgan.federated.likelihood_free.gradient_free import Answers, GradientFree, mean_answer, summaries

OWN, COUNT = "inference.own", "inference.count"
ROOT, SIMULATED = "root", "simulated"


class DiscrepancySearch(GradientFree):
    """Sequential Monte Carlo by discrepancies that clients answer: the idea of GRAFFL, by the rule of ``Inference``.

    A generation is a round of one exchange: the server sends the mean embeddings of m simulated data sets in r
    directions, R mu_i (m, r); client k answers one number for each,

        D_ki = || R (mu_i - mu_k) ||^2,   mu_k = 1/n_k sum phi(x),   summed with its n_k

    and sum_k n_k D_ki / n differs from the pooled data's discrepancy by the same constant for all i. The answers only
    sum, so secure aggregation hides each client's. The published rule, in which every record answers a point of its
    own, is PublishedRejection.

    Not private: r + 1 data sets give R mu away. ``questions.statistic`` solves for it, so that a generation's moves
    need no further question. The server learns the mean embedding of all records, as if it had been sent; without
    secure aggregation each client's. It learns nothing else, whatever it asks. SearchOnRelease adds noise once.

    The posterior is that of the clients that answered: of a cohort, in a round; of all but those that dropped out.

    Price of a generation: m numbers up, and r times that down; m is the module's number of particles, r at most twice
    ``frequencies`` and at most six for each parameter.

    Args:
        inner: trains the summary; FedAvg by default.
        from_round: the first round without training, from 0.
        inference: ``frequencies``, ``moves``, ``even``, ``surplus`` and ``most_records`` of Inference.
    """

    def generation(self, server: Server) -> Rounds:
        """From the prior in the first round; a generation of the search, or a pass of the refinement."""
        generator, stage = self.generator(server), self.stage(server)
        inference = self.inference
        asking = inference.start(generator) if stage is None else inference.step(stage, generator)
        self.keep(server, (yield from self._exchanged(server, asking)))

    def _exchanged(self, server: Server, asking: Asking[Stage]) -> Generator[Exchange, Answers, Stage]:
        """Inference whose questions go to the cohort."""
        try:
            question = next(asking)
            while True:
                answers = yield self.asks(server, "discrepancy", {ROOT: question.root, SIMULATED: question.simulated})
                question = asking.send(SummedAnswer(mean_answer(answers), float(answers.weight)))
        except StopIteration as end:
            return end.value

    @torch.no_grad()
    def discrepancy(self, client: Client, sent: Broadcast) -> Message:
        """How far each simulated data set is from the client's records; n_k counts those that are looked at."""
        state, phi = client.state, self.inference.phi
        if OWN not in state:  # made once, since the summary is fixed
            total, count = torch.zeros(phi.size, dtype=torch.float64), 0
            for x in summaries(client):
                total += phi(x.to(phi.omega)).double().sum(0)
                count += len(x)
            state[OWN], state[COUNT] = total / max(count, 1), torch.tensor([float(count)], dtype=torch.float64)
        question = Question(sent[ROOT].cpu(), sent[SIMULATED].cpu())
        return Answers(numbers=question.discrepancies(state[OWN]), weight=float(state[COUNT]))
