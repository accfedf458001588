"""A training step of an SRU against nn.LSTM's of the same depth and width: forward and backward.

OMP_NUM_THREADS=1 python -m evidence.sru --output evidence/results/sru.md
"""

import torch
from torch import nn

from benchmarks.side_by_side import interleaved, markdown, options, publish
from lit_epgan.networks.speech_networks import SRU


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--frames", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(args.batch, args.frames, args.width)
    sru = SRU(args.width, args.width, args.layers, dropout=0.1)
    lstm = nn.LSTM(args.width, args.width, args.layers, dropout=0.1, batch_first=True)

    def sru_step() -> None:
        sru(x).square().mean().backward()

    def lstm_step() -> None:
        lstm(x)[0].square().mean().backward()

    seconds = interleaved({"SRU": sru_step, "nn.LSTM": lstm_step}, args.repeats)
    base = seconds["SRU"]
    rows = [[name, f"{time * 1e3:.1f}", f"{time / base:.2f}"] for name, time in seconds.items()]
    notes = (
        f"{args.layers} layers of {args.width}, batches of {args.batch} x {args.frames} frames, dropout 0.1; medians "
        f"of {args.repeats} interleaved steps. Bar: the LSTM takes at least 1.3 times as long."
    )
    publish(
        markdown("A training step of an SRU against an LSTM's", ["", "step, ms", "**ratio**"], rows, notes), args.output
    )


if __name__ == "__main__":
    main()
