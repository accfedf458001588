"""Who is served well and who badly: a table, a picture and a file of every client's metrics."""

import math
from pathlib import Path

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lit_epgan.callbacks.client_metrics import ClientMetrics
from lit_epgan.lib.atomic import replacing
from lit_epgan.lib.text import markup, mathtext, printable
from lit_epgan.metrics.over_clients import MEAN, SPREAD, WEIGHTED, ClientResults, over_clients
from lit_epgan.runs.optional_files import optional_file

PRINTED = 20  # clients in the terminal
DRAWN = 30  # clients in a panel
PANELS = 3  # side by side
TICK = 24  # characters of a client's name beside a panel
INK, GRID, DOT, WORST = "#333333", "#e4e4e4", "#5b7db1", "#c0392b"


class ClientReport(Callback):
    """Writes what ``validate`` and ``test`` have measured at each client into the run's folder, and prints it.

    ``test_clients.csv`` has a row for each client: its records, its metrics, and in which of them it is the worst.
    ``pictures/test_clients.png`` shows each metric, the worst client first; of many clients the worst are shown. After
    ``validate`` the names begin with ``validate``. Without clients that hold data of their own nothing is written.
    """

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report a ``validate``; within a fit the numbers are logged alone."""
        if trainer.state.fn == "validate":
            self._report(trainer, "validate")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report(trainer, "test")

    @staticmethod
    def _report(trainer: Trainer, stage: str) -> None:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        results = next((c.results for c in callbacks if isinstance(c, ClientMetrics)), None)
        if results is None or not results.values or not trainer.is_global_zero:
            return
        run = Path(trainer.default_root_dir)
        file, picture = run / f"{stage}_clients.csv", run / "pictures" / f"{stage}_clients.png"
        with replacing(file) as beside:
            results.table().to_csv(beside)
        with optional_file(picture), replacing(picture) as beside:
            clients_picture(results).savefig(beside, dpi=150, format="png")
        print_clients(results, Console())
        print(f"Every client's metrics are in {printable(str(file))}, as a picture in {printable(str(picture))}.")


def worst_first(results: ClientResults, metric: str) -> list[int]:
    """The clients that have the metric, from the worst to the best; without a direction from the lowest on."""
    values, way = results.values[metric], results.higher_is_better[metric]
    sign = -1 if way is False else 1
    return sorted(values, key=lambda client: (not math.isnan(values[client]), sign * values[client]))


def print_clients(results: ClientResults, console: Console) -> None:
    """Print a row for each client and the means below; of many clients those who are worst in the first metric."""
    worst = results.worst()
    headline = next(iter(worst), next(iter(results.values)))
    clients = list(results.records)
    if few := len(clients) > PRINTED:
        clients = worst_first(results, headline)[:PRINTED]
    title = f"The {PRINTED} of {len(results.records)} clients with the worst {headline}" if few else "Metrics by client"
    table = _table(results, title, clients, worst)
    if console.measure(table, options=console.options.update(max_width=1000)).maximum > console.width:
        table = _table(results, title, clients, worst, between="\n", padding=0)
    console.print(table)


def _table(
    results: ClientResults,
    title: str,
    clients: list[int],
    worst: dict[str, int],
    between: str = " ",
    padding: int | tuple[int, int] = (0, 1),
) -> Table:
    """A row for each client and the means; ``between`` words and ``padding`` of the cells make it wide or narrow."""
    table = Table(title=markup(title), box=SIMPLE_HEAD, pad_edge=False, padding=padding, min_width=len(title))
    for column in ("client", "records", *results.values):
        words = between.join(map(markup, column.split("_")))
        table.add_column(words, justify="left" if column == "client" else "right")
    for client in clients:
        cells = []
        for metric, values in results.values.items():
            value = values.get(client)
            shown = "not defined" if value is None else f"{value:.4g}"
            cells.append(f"[bold]{shown}{between}worst[/bold]" if worst.get(metric) == client else shown)
        table.add_row(markup(results.names[client]), f"{results.records[client]:,}", *cells)
    table.add_section()
    for row, name in ((MEAN, "mean over clients"), (WEIGHTED, "weighted by records"), (SPREAD, "standard deviation")):
        means = [over_clients(values, results.records, None)[row] for values in results.values.values()]
        table.add_row(name, "", *(f"{mean:.4g}" for mean in means))
    return table


def clients_picture(results: ClientResults) -> Figure:
    """A panel for each metric: a point for each client, the worst on top and red, and a line at the clients' mean."""
    metrics = list(results.values)
    across = min(PANELS, len(metrics))
    down = -(-len(metrics) // across)
    rows = min(DRAWN, max(len(values) for values in results.values.values()))
    figure = Figure(figsize=(4.2 * across, down * (1.2 + 0.24 * rows)))
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
    figure.suptitle("red: the worst client; dotted: mean over clients", color=INK, fontsize=9)
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for axes, metric in zip(panels, metrics, strict=False):
        _draw(axes, results, metric)
    for axes in panels[len(metrics) :]:
        axes.set_visible(False)
    return figure


def _draw(axes: Axes, results: ClientResults, metric: str) -> None:
    values, way = results.values[metric], results.higher_is_better[metric]
    clients = worst_first(results, metric)[:DRAWN]
    shown = [values[client] for client in clients]
    colours = [WORST if way is not None and not place else DOT for place in range(len(clients))]
    axes.scatter(shown, np.arange(len(clients)), color=colours)
    axes.axvline(over_clients(values, results.records, None)[MEAN], color=INK, linewidth=1, linestyle=":")
    names = [printable(results.names[client]) for client in clients]
    axes.set_yticks(np.arange(len(clients)), [mathtext(n if len(n) <= TICK else f"{n[:TICK]}…") for n in names])
    axes.set_ylim(max(len(clients), 2) - 0.5, -0.5)
    better = {True: "higher is better", False: "lower is better", None: "no direction given"}[way]
    axes.set_title(mathtext(metric), color=INK, fontsize=10)
    part = "" if len(clients) == len(values) else f" ({len(clients)} of {len(values)} clients)"
    axes.set_xlabel(f"{better}{part}", color=INK, fontsize=8)
    axes.tick_params(length=0, colors=INK, labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(color=GRID)
    axes.set_axisbelow(True)
