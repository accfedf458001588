"""What to look at next, in plain words, by rules on what the detectors say."""

from collections.abc import Sequence

from lit_epgan.inspection.detectors import PUBLIC, Detection


def look_next(detections: Sequence[Detection], refused: Sequence[str]) -> list[str]:
    """Sentences, the most pressing one first.

    Args:
        detections: all comparisons that were made.
        refused: groups that were too small.
    """
    alarms = [each for each in detections if each.alarm]
    odd = {each.first for each in alarms if each.second == PUBLIC}  # the others may owe their alarms to these
    own = [each for each in alarms if each.first in odd or each.second not in odd]
    found = [_of_group(name, [e for e in own if e.first == name]) for name in dict.fromkeys(e.first for e in own)]
    for name in refused:
        found.append(
            f"The group “{name}” has too few users to be looked at. That is an answer, too: the selection fits few. "
            "To see it, ask more users, or widen the selection; more noise would not help, and less costs more epsilon."
        )
    if not alarms and detections:
        worst = max(each.detectable for each in detections)
        found.append(
            f"No alarm. Any of the differences would have raised one, with a probability of 95 %, from {worst:.2f} on. "
            "Smaller ones, and faults that change neither brightness nor borders, may be there: look at the pictures."
        )
    if alarms:
        found.append(
            "Once the fault is mended, run the inspection again: the alarms must be gone. It costs the same again, in "
            "the same ledger."
        )
    return found


def _of_group(name: str, alarms: Sequence[Detection]) -> str:
    by_name = {each.statistic.name: each for each in alarms}
    pixel, border = by_name.get("mean_pixel"), by_name.get("bright_border")
    sides = " and ".join(dict.fromkeys(f"“{each.second}”" for each in alarms))
    if pixel is not None and pixel.means[0].estimate * pixel.means[1].estimate < 0 and border is not None:
        return (
            f"In the group “{name}” light and dark have changed places against {sides}: the mean pixel has the other "
            f"sign, and the border, which is background, is {'bright' if border.gap.estimate > 0 else 'dark'}. Look at "
            "how pixels are encoded before they reach the model, on those users' devices or versions: an inversion "
            "(x to -x, or to 1 - x), or a file format in which 0 is white."
        )
    if border is not None and pixel is None:
        return (
            f"In the group “{name}” the border is {'brighter' if border.gap.estimate > 0 else 'darker'} than in "
            f"{sides}, and the images as a whole are not. Look at cropping, shifts and padding."
        )
    gap = alarms[0].gap.estimate
    return (
        f"The group “{name}” is {'brighter' if gap > 0 else 'darker'} than {sides}. Look at scaling, contrast and the "
        "range of values before the model, and in the pictures at the strokes' weight."
    )
