"""``new NAME``: a folder with a module, a data module, a configuration and a test, to begin one's own from."""

from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path

from lit_epgan.lib.errors import UserError

USAGE = "python -m lit_epgan new NAME"
TEMPLATE = Path(__file__).parent / "template"


def new(args: list[str]) -> int:
    """Make the folder ``NAME`` in the working directory, and say how to go on; 0.

    Raises:
        UserError: there is no one name, it is none of a Python module or another module's, or the folder is there.
    """
    if args in (["-h"], ["--help"]):
        print(f"Usage: {USAGE}\n\nMakes the folder NAME with NAME.py, NAME.yaml and test_NAME.py.")
        return 0
    if len(args) != 1:
        raise UserError(f"Usage: {USAGE}")
    (name,) = args
    if not name.isidentifier() or iskeyword(name) or not name.isascii():
        raise UserError(f"{name!r} cannot be a Python module's name: take letters, digits and _, a letter first.")
    folder = Path(name)
    if folder.exists():
        raise UserError(f"{folder.absolute()} is there already: take another name, or another working directory.")
    if find_spec(name) is not None:
        raise UserError(f"{name} is the name of a Python module: take another.")
    folder.mkdir()
    for source in sorted(TEMPLATE.glob("*mine.*")):
        text = source.read_text(encoding="utf-8").replace("mine", name)
        (folder / source.name.replace("mine", name)).write_text(text, encoding="utf-8")
    print(f"cd {name}\npython -m pytest\npython -m lit_epgan fit --config {name}.yaml")
    return 0
