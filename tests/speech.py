"""A miniature of the embedded corpus, for whoever needs speech."""

from typing import Any

MINIATURE: dict[str, Any] = {
    "train_sessions": 3,
    "dev_sessions": 1,
    "eval_sessions": 2,
    "minutes": 1.5,
    "words": 40,
    "speakers": 2,
    "grammar": 300,
    "iterations": 8,
    "gaussians": 200,
    "workers": 1,
}


# what makes the results of the stages, under lit_epgan.speech
MAKERS = ("synthesis._speak_session", "preparation._write_features", "preparation._align", "preparation.decoding_graph")


# what makes the results of the stages, under lit_epgan.speech
MAKERS = ("synthesis._speak_session", "preparation._write_features", "preparation._align", "preparation.decoding_graph")


def words_of_miniature(cache: Any) -> list[str]:
    settings = MINIATURE | {"cache_dir": cache}
    return [word for key, value in settings.items() for word in (f"--data.{key}", str(value))]
