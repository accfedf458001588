"""What a language model needs before its guarantee means something: the fault of ``joined_tokens.py``, all sentences.

Every user takes part in every round, which is the least noise on a coordinate of the mean that epsilon allows; it is
simulated with 10 users a round and as much less noise. One character model is trained at the noise that 635 users leave
at epsilon 8. The one of the simulation that finds the fault is in ``results/joined_tokens.md``. It is counted how many
users that one stands for.

OMP_NUM_THREADS=1 python benchmarks/joined_tokens_guarantee.py --output benchmarks/results/joined_tokens_guarantee.md
"""

from joined_tokens import COHORT, MADE, Z, percent, trained
from scaled_up import drawn, everyone
from side_by_side import markdown, options, publish

from lit_epgan.privacy import Releases, noise_multiplier_for

DELTA = 1e-5
EPSILONS = (1.0, 2.0, 4.0, 8.0)
LARGE_COHORT = 1000  # with z = 1, as in the paper's realistic scenario


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--users", type=int, default=635)
    parser.add_argument("--epsilon", type=float, default=8.0)
    args = parser.parse_args()
    z = noise_multiplier_for(args.epsilon, DELTA, lambda z: [Releases(z, args.rounds)])
    each = trained("characters", 1.0, args.rounds, 0, z / args.users * COHORT)
    made, likeliest = each["made"], ", ".join(f"`{word}`" for word in each["top"][:6])
    share = f"{percent(made.share)} ({percent(made.low)} - {percent(made.high)})"
    name = f"{args.users} users at epsilon {args.epsilon:g}"
    rows = [[name, f"{z / args.users:.2g}", share, percent(each["held"]), likeliest, f"{each['seconds']:.0f}"]]
    first = markdown(
        "First tokens joined, by a language model under a guarantee",
        ["noise of", "z / users a round", f"of {MADE:,} words made, joined, % (95 %)",
         "of the users' words outside the vocabulary, %", "the most probable", "seconds"],
        rows,
        f"Character model of 128 cells, {args.rounds} rounds, all sentences with the fault, one seed. {args.users} "
        f"users who all take part in {args.rounds} rounds have z = {z:.3g} at epsilon {args.epsilon:g}, delta "
        f"{DELTA:g} (one user's data emptied; Gaussian mechanism, exactly); simulated with {COHORT} users a round and "
        f"the same noise on each coordinate of the mean. The simulation that finds the fault has {Z / COHORT:g}.",
    )  # fmt: skip
    ratio = Z / COHORT
    needed = [
        [f"{epsilon:g}", f"{everyone(ratio, args.rounds, epsilon, DELTA):,}",
         f"{drawn(ratio, args.rounds, epsilon, DELTA, LARGE_COHORT) or 'more than a billion':,}"]
        for epsilon in EPSILONS
    ]  # fmt: skip
    second = markdown(
        "Users that the simulation stands for",
        ["epsilon", "all take part in every round", f"{LARGE_COHORT:,} a round, z = {ratio * LARGE_COHORT:g}"],
        needed,
        f"Not run: counted. z / users a round = {ratio:g}, {args.rounds} rounds, delta {DELTA:g}, one user's data "
        "emptied; Gaussian mechanism exactly, and Renyi divergences.",
    )
    publish(first + "\n" + second, args.output)


if __name__ == "__main__":
    main()
