"""A folder of typefaces: the fonts that matplotlib ships."""

from pathlib import Path

import matplotlib

SHIPPED = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
FAMILIES = {  # upright fonts first
    "dejavu-mono": ["DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique"],
    "dejavu-sans": ["DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique"],
    "dejavu-serif": ["DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic"],
    "modern": ["cmr10"],
    "modern-bold": ["cmb10"],
    "modern-sans": ["cmss10"],
    "stix": ["STIXGeneral", "STIXGeneralBol", "STIXSizOneSymReg"],
    "typewriter": ["cmtt10"],
}
UPRIGHT = {"dejavu-mono": 2, "dejavu-sans": 2, "dejavu-serif": 2, "modern": 1, "modern-bold": 1, "modern-sans": 1}
UPRIGHT |= {"stix": 2, "typewriter": 1}


def write_fonts(folder: Path) -> Path:
    """A folder for each family, the fonts one deeper, as npm's packages have them."""
    for family, names in FAMILIES.items():
        (folder / family / "files").mkdir(parents=True)
        for name in names:
            (folder / family / "files" / f"{name}.ttf").symlink_to(SHIPPED / f"{name}.ttf")
            (folder / family / "files" / f"{name}-again.ttf").symlink_to(SHIPPED / f"{name}.ttf")
    return folder
