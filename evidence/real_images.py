"""The training images judged as samples are, and how many test images the judging classifier was trained on.

python -m evidence.real_images --output evidence/results/real_images.md

The digits of studies/digits.yaml: its seeds, each with its own test images.
"""

import statistics

import torch
from sklearn.datasets import load_digits

from benchmarks.side_by_side import markdown, options, publish
from lit_epgan.lib.class_splits import split_by_class
from lit_epgan.metrics.image_classifiers import digits_classifier
from lit_epgan.metrics.image_scores import ImageScores, reference

SPLIT_SEED = 7


def judged(seed: int) -> tuple[float, float]:
    """The Frechet distance between a seed's training and test images, and the classifier's share of the latter."""
    source = load_digits()
    images, labels = (
        torch.tensor(source.data / 8 - 1, dtype=torch.float32).view(-1, 1, 8, 8),
        torch.tensor(source.target),
    )
    learnt, _ = split_by_class(labels, SPLIT_SEED)
    train, test = split_by_class(labels, SPLIT_SEED, "by_seed", seed)
    extractor = digits_classifier()
    scores = ImageScores(extractor, len(train))
    scores.add(images[train])
    found = scores.against(reference(extractor, lambda: [images[test]]))
    return found["fid_digits"], float(torch.isin(test, learnt).float().mean())


def main() -> None:
    """Write the table."""
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(300, 310)), help="of the test images")
    args = parser.parse_args()
    distances, shares = zip(*map(judged, args.seeds), strict=True)
    spread = f" ± {statistics.stdev(distances):.3f}" if len(distances) > 1 else ""
    row = [f"{statistics.fmean(distances):.3f}{spread}", f"{100 * statistics.fmean(shares):.0f} %", len(args.seeds)]
    head = ["Frechet distance (digits) of the training images", "test images that trained the classifier", "seeds"]
    publish(markdown("Real images, judged as samples are", head, [row]), args.output)


if __name__ == "__main__":
    main()
