"""Draws what an offline Weights & Biases run holds: python docs/wandb_picture.py RUN.wandb docs/pictures/wandb.png

For docs/pictures/wandb.png, from the repository's root:

    WANDB_MODE=offline python -m lit_epgan fit --config digits_generator_sites.yaml
    python docs/wandb_picture.py runs/digits_generator_sites/wandb/offline-run-*/run-*.wandb docs/pictures/wandb.png
"""

import sys
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests/, which read the files too

from lit_epgan.runs.loggers import headlines
from tests.wandb_history import configuration, history, summary, title


def draw(file: Path, picture: Path) -> None:
    """Its name and settings, the headline metrics over the rounds with last and best, and the last samples.

    Args:
        file: of the offline run.
        picture: The PNG to write.
    """
    rows, told, summed = history(file), configuration(file), summary(file)
    names = headlines({name for row in rows for name in row})
    figure = Figure(figsize=(3.2 * (len(names) + 1), 3.2), layout="constrained", dpi=100)
    figure.suptitle(f"{title(file)[0]}\n{_settings(told)}", fontsize=9, x=0.01, ha="left")
    *charts, last = figure.subplots(1, len(names) + 1)
    for axes, name in zip(charts, names, strict=True):
        points = [(row["round"], row[name]) for row in rows if name in row]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3)
        values = ", ".join(f"{name}.{which} {value:.4g}" for which, value in sorted(summed[name].items()))
        axes.set_title(values, fontsize=8)
        axes.set_xlabel("round", fontsize=8)
    last.axis("off")
    if shown := [row for row in rows if "pictures/samples/filenames" in row]:
        (name,) = shown[-1]["pictures/samples/filenames"]
        last.imshow(Image.open(file.parent / "files" / name))
        last.set_title(f"pictures/samples, round {shown[-1]['round']}", fontsize=8)
    FigureCanvasAgg(figure).print_png(str(picture))


def _settings(told: dict[str, Any]) -> str:
    algorithm = ((told.get("federation") or {}).get("init_args") or {}).get("algorithm") or {}
    data = (told.get("data") or {}).get("init_args") or {}
    said = {
        "algorithm": algorithm.get("class_path"),
        "partition": data.get("partition"),
        "clients": data.get("clients"),
    }
    return ", ".join(f"{name} {value}" for name, value in said.items() if value is not None)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
