"""`python -m tests.api.scripted_server DIR [option=value …]`: the real server with a scripted model."""

import sys

from baton.api.config import load
from baton.api.machine.signals import Signals
from baton.api.serve import serve
from baton.api.wiring import load as load_model
from baton.models.family import Family, Piece
from baton.models.loading.checkpoint import FAMILIES
from tests.api.scripted import ScriptedModel

if __name__ == "__main__":
    folder, *options = sys.argv[1:]
    FAMILIES["scripted"] = Family(
        build=lambda config, *dtypes: ScriptedModel.from_config(config.values),
        pieces=lambda name, config: [Piece(name)],
        embedding="",
    )
    # A scripted model has no rings for drafts.
    fixed = {"model": folder, "port": "0", "log_format": "json", "speculation": "off"}
    values = fixed | dict(option.split("=") for option in options)
    signals = Signals()
    signals.take()
    serve(load(values), load_model, signals)
