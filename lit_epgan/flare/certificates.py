"""Where FLARE keeps a site's certificate."""

from pathlib import Path

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext

from lit_epgan.remote.identity import FILES


def certificates(fl_ctx: FLContext) -> str:
    """The folder of the site's certificate, its kit's ``startup``; empty under the simulator, which has none."""
    workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
    folder = Path(workspace.get_startup_kit_dir()).resolve() if workspace is not None else None
    return str(folder) if folder is not None and all((folder / name).is_file() for name in FILES) else ""
