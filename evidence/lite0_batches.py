"""Processor time of EfficientNet-Lite0's look at an image of 224 pixels, by how many it looks at a time.

OMP_NUM_THREADS=1 python -m evidence.lite0_batches --output evidence/results/lite0_batches.md
"""

import time
from functools import partial

import torch

from benchmarks.side_by_side import interleaved, markdown, options, publish
from lit_epgan.metrics import Lite0


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--batches", type=int, nargs="+", default=[Lite0.batch_on_cpu, 16, 64, 256])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    extractor, images = Lite0(), torch.rand(args.images, 3, 32, 32) * 2 - 1
    candidates = {str(size): partial(extractor.extract, images, size) for size in args.batches}
    seconds = interleaved(candidates, args.repeats, warm_up=1, clock=time.process_time)
    first = next(iter(seconds.values()))
    rows = [[name, f"{1000 * each / args.images:.1f}", f"{each / first:.1f}"] for name, each in seconds.items()]
    heads = ["images at a time", "milliseconds an image", "to the first"]
    publish(markdown("EfficientNet-Lite0 on a CPU", heads, rows, f"{args.images} images."), args.output)


if __name__ == "__main__":
    main()
